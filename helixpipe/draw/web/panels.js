// A panel: one timeline, its rows from top to bottom, and where they lie.

const LEFT = 58, RIGHT = 68, TOP = 8, AXIS = 38;  // pixels beside and above the plot, and below it
const LANE = 0.42;  // of a row: the height of a lane

class Panel {
  constructor(data, index) {
    Object.assign(this, {data, index, ops: data.ops, ranks: data.ranks, unit: data.unit, size: data.size});
    this.rows = Array.from({length: this.ranks}, () => []);
    if (data.circle) return this.standStill();
    this.program = makeProgram(data);
    this.given = this.times = timesOf(data, this.program);
    this.byCell = new Map(data.ops.rank.map((_, op) => [cellOf(this, op), op]));
    this.collect();
    this.wrong = Math.abs(this.times.makespan - data.makespan) > 1e-9 * data.makespan;
    this.take(this.times);
  }

  standStill() {  // a program that cannot run has no times: its ops in order, as if each took as long
    const {ops} = this, total = ops.rank.length;
    this.times = this.given = {start: new Float64Array(total), end: new Float64Array(total), makespan: 0};
    this.program = {numOps: total, total, order: [], before: [], after: [], previous: [], next: [], simulated: false};
    ops.rank.forEach((rank, op) => {
      this.times.start[op] = this.rows[rank].length;
      this.times.end[op] = this.rows[rank].push(op);
    });
    this.byCell = new Map(ops.rank.map((_, op) => [cellOf(this, op), op]));
    this.lanes = this.rows.map(() => []);
    this.times.makespan = Math.max(...this.rows.map(row => row.length));
    this.path = [];
    const circle = new Set(this.data.circle.map(([op]) => op));
    this.stuck = new Set(ops.rank.map((_, op) => op).filter(op => !this.data.ended[op] && !circle.has(op)));
    this.idle = this.rows.map(() => 0);
    this.looks = this.allLooks();
  }

  whatIs(task) {
    const {data, ops} = this;
    if (task < ops.rank.length) return {type: OPS, rank: ops.rank[task]};
    let number = task - ops.rank.length;
    if (number < data.messages.length) {
      const [kind, source, target, producer, consumer] = data.messages[number];
      return {type: MESSAGE, kind, source, target, producer, consumer, rank: source};
    }
    number -= data.messages.length;
    if (number < data.collectives.length) {
      const [kind, rank, op, ranks] = data.collectives[number];
      return {type: SHARING, kind, rank, op, ranks};
    }
    const [rank, inward, op] = data.copies[number - data.collectives.length];
    return {type: COPY, rank, inward, op};
  }

  collect() {  // rows of ops, and lanes of transfers, each in the order in which they run
    const links = this.rows.map(() => new Map()), shared = this.rows.map(() => []), copies = this.rows.map(() => [[], []]);
    for (const task of this.program.order) {
      const what = this.whatIs(task);
      if (what.type === OPS) this.rows[what.rank].push(task);
      else if (what.type === COPY) copies[what.rank][what.inward].push(task);
      else if (what.type === SHARING && what.op >= 0) shared[what.rank].push(task);
      else if (what.type === MESSAGE) {
        if (!links[what.source].has(what.target)) links[what.source].set(what.target, []);
        links[what.source].get(what.target).push(task);
      }
    }
    this.lanes = this.rows.map((_, rank) => {
      const lanes = [];
      if (copies[rank].some(own => own.length))
        copies[rank].forEach((tasks, inward) => lanes.push({type: COPY, label: page.data.lanes[inward].lane, tasks}));
      if (shared[rank].length) lanes.push({type: SHARING, label: "gather", tasks: shared[rank]});
      for (const target of [...links[rank].keys()].sort((a, b) => a - b))
        lanes.push({type: MESSAGE, label: "→ " + target, tasks: links[rank].get(target)});
      return lanes;
    });
    this.looks = this.allLooks();
  }

  allLooks() {  // of each rank's ops by stage and kind
    return this.rows.map(row => {
      const stages = [...new Set(row.map(op => this.ops.stage[op]))].sort((a, b) => a - b), looks = {};
      stages.forEach((stage, index) => {
        for (const kind in page.data.kinds) {
          const fill = shade(page.data.kinds[kind].colour, index, stages.length);
          looks[stage + kind] = {fill, ink: inkOn(fill)};
        }
      });
      return looks;
    });
  }

  take(times) {  // times, and what follows from them
    this.times = times;
    this.span = times.makespan;
    this.idle = this.rows.map(row =>
      this.span ? 1 - row.reduce((sum, op) => sum + times.end[op] - times.start[op], 0) / this.span : 0);
    this.bubble = this.idle.reduce((sum, share) => sum + share, 0) / (this.ranks || 1);
    this.path = criticalPath(this.program, times);
    this.onPath = new Set(this.path);
    this.slack = this.program.simulated ? slackOf(this.program, times) : null;
    if (this.data.memory) {
      this.memory = this.rows.map((_, rank) => memorySteps(this.data, times, rank));
      this.memoryTop = [0, 1].map(i => Math.max(...this.memory.map(own => own.most[i])));
      this.memoryUnit = this.data.memory.unit;
    }
    this.texts = null;
  }

  layout(settings) {  // the strips of all ranks from top to bottom, in pixels
    const strips = [], wanted = settings.rowHeight || Math.max(9, Math.min(30, 420 / this.ranks));
    const shown = this.lanes.flat().filter(own => own.type === MESSAGE ? settings.links : settings.copies).length;
    const lane = Math.max(1.5, Math.min(14, Math.max(5, wanted * LANE), 24000 / shown));  // a canvas has its limits
    let top = TOP;
    const add = (strip, height) => {
      strips.push({...strip, top, height});
      top += height;
    };
    this.rows.forEach((tasks, rank) => {
      add({type: OPS, rank, tasks}, wanted);
      for (const own of this.lanes[rank])
        if (own.type === MESSAGE ? settings.links : settings.copies) add({...own, rank}, lane);
      if (settings.memory && this.memory) {
        add({type: "device", rank, tasks: []}, Math.max(20, wanted * 0.9));
        if (this.memoryTop[1]) add({type: "host", rank, tasks: []}, Math.max(16, wanted * 0.6));
      }
      if (strips.at(-1).type !== OPS) top += 4;
      if (this.data.circle) top += 26;  // for arrows
    });
    Object.assign(this, {strips, rowHeight: wanted, laneHeight: lane, plotHeight: top, height: top + AXIS});
    this.rowOf = strips.filter(strip => strip.type === OPS);
  }

  stripOf(task) {  // where a task is drawn; undefined where its lane is not shown
    const what = this.whatIs(task);
    if (what.type === OPS) return this.rowOf[what.rank];
    return this.strips.find(strip => strip.rank === what.rank && strip.type === what.type &&
      (what.type === MESSAGE ? strip.label === "→ " + what.target
        : what.type !== COPY || strip.label === page.data.lanes[what.inward].lane));
  }

  firstEndingAfter(tasks, time) {
    let low = 0, high = tasks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times.end[tasks[middle]] > time) high = middle; else low = middle + 1;
    }
    return low;
  }
}
