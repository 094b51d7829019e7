// Questions to Python and their answers. What was asked before is answered from memory.

export class Core {
  constructor(status) {
    this.status = status;
    this.number = 0;
    this.waiting = new Map();
    this.known = new Map();
    this.worker = new Worker(new URL("./worker.js", import.meta.url), {type: "module"});
    this.worker.onmessage = ({data}) => this.receive(data);
    this.worker.onerror = event => this.receive({failed: event.message || "its worker did not start"});
    this.started = false;
    this.tell();
  }

  know(method, question, answer) {  // an answer that was there before Python
    this.known.set(method + JSON.stringify(question), answer);
  }

  ask(method, question, ...words) {
    const key = method + JSON.stringify(question) + words.join(" ");
    if (this.known.has(key)) return Promise.resolve(this.known.get(key));
    const id = ++this.number;
    this.worker.postMessage({id, method, words: [JSON.stringify(question), ...words]});
    return new Promise((resolve, reject) => {
      this.waiting.set(id, {reject, resolve: answer => {
        if (this.known.size > 60) this.known.delete(this.known.keys().next().value);
        this.known.set(key, answer);
        resolve(answer);
      }});
      this.tell();
    });
  }

  receive({id, ready, answer, failed}) {
    if (ready) this.started = true;
    else if (id === undefined) {
      this.status("Python did not start", false);
      document.getElementById("failed").hidden = false;
      document.getElementById("failed").textContent = `Python did not start: ${failed}`;
      for (const {reject} of this.waiting.values()) reject(new Error(failed));
      return;
    } else {
      const {resolve, reject} = this.waiting.get(id);
      this.waiting.delete(id);
      if (failed === undefined) resolve(answer);
      else reject(new Error(failed));
    }
    this.tell();
  }

  tell() {
    if (!this.started) this.status("Python is starting", true);
    else if (this.waiting.size) this.status("Simulating", true);
    else this.status("Ready", false);
  }
}
