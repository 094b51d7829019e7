// Python in a worker: the planning core, which answers one question after another.
import {loadPyodide} from "./pyodide/pyodide.mjs";

const ready = start();

async function start() {
  const archive = fetch("./python.zip").then(response => response.arrayBuffer());
  const python = await loadPyodide({indexURL: new URL("./pyodide/", import.meta.url).href});
  python.unpackArchive(await archive, "zip", {extractDir: "/core"});
  return python.runPython(`
import sys
sys.path.insert(0, "/core")
from helixpipe.cli.answers import Answers
from schedules import CATALOGUE
Answers(CATALOGUE)
`);
}

addEventListener("message", async ({data: {id, method, words}}) => {
  try {
    const answers = await ready;
    postMessage({id, answer: JSON.parse(answers[method](...words))});
  } catch (error) {
    postMessage({id, failed: String(error.message ?? error).trim().split("\n").at(-1)});
  }
});
ready.then(() => postMessage({ready: true}), error => postMessage({failed: String(error)}));
