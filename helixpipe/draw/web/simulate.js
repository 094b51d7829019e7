// The simulator: tasks as early as what they wait for and what they run on allow. Pure functions of the data.

function makeProgram(data) {  // what each task waits for and runs on; tasks are ops, messages, collectives, copies
  const numOps = data.ops.rank.length, resources = new Map(), of = data.ops.rank.map(rank => "rank " + rank);
  for (const [, source, target] of data.messages) of.push(`link ${source} ${target}`);
  for (const [, , , ranks] of data.collectives) of.push("group " + ranks);
  for (const [rank, inward] of data.copies) of.push(`copy ${rank} ${inward}`);
  const total = of.length, before = Array.from({length: total}, () => []), after = before.map(() => []);
  if (data.before) data.before.forEach((own, task) => { before[task] = own.map(back => task - back); });
  else measuredWaits(data, before);
  before.forEach((own, task) => own.forEach(other => after[other].push(task)));
  const order = data.order ?? of.map((_, task) => task).sort((a, b) => data.start[a] - data.start[b] || data.end[a] - data.end[b]);
  const previous = new Int32Array(total).fill(-1), next = new Int32Array(total).fill(-1);
  for (const task of order) {
    const last = resources.get(of[task]) ?? -1;
    previous[task] = last;
    if (last >= 0) next[last] = task;
    resources.set(of[task], task);
  }
  return {total, numOps, before, after, order, previous, next, simulated: !!data.order};
}

function measuredWaits(data, before) {  // of a recording: its messages and copies say what it knows of them
  const {ops} = data, numOps = ops.rank.length, firstCopy = numOps + data.messages.length + data.collectives.length;
  data.messages.forEach(([kind, , , producer, consumer], number) => {
    if (kind >= OF_WEIGHTS) return;
    before[numOps + number].push(producer);
    before[consumer].push(numOps + number);
  });
  data.copies.forEach(([, inward, op], number) => {
    if (inward) before[op].push(firstCopy + number);
    else before[firstCopy + number].push(op);
  });
  const units = new Map();  // F, then R, then B or I, then W of one unit on one rank
  ops.rank.forEach((rank, op) => {
    const unit = [ops.stage[op], ops.microbatch[op], ops.chunk[op] ?? 0].join();
    if (!units.has(unit)) units.set(unit, []);
    units.get(unit).push(op);
  });
  for (const own of units.values()) {
    own.sort((a, b) => "FRBIW".indexOf(ops.kind[a]) - "FRBIW".indexOf(ops.kind[b]));
    own.slice(1).forEach((op, index) => before[op].push(own[index]));
  }
}

function runTasks(program, durations) {
  const start = new Float64Array(program.total), end = new Float64Array(program.total), {before, previous} = program;
  let makespan = 0;
  for (const task of program.order) {
    let free = previous[task] >= 0 ? end[previous[task]] : 0;
    for (const other of before[task]) if (end[other] > free) free = end[other];
    start[task] = free;
    end[task] = free + durations[task];
    if (end[task] > makespan) makespan = end[task];
  }
  return {start, end, makespan};
}

function timesOf(data, program, durations) {  // simulated, or as they were measured
  if (program.simulated) return runTasks(program, durations ?? data.classOf.map(own => data.classes[own].time));
  return {start: Float64Array.from(data.start), end: Float64Array.from(data.end), makespan: data.makespan};
}

function rate(name, byHand, values, splits) {  // what one unit of an amount takes
  if (name === "rest") return 1;
  const [kind, piece] = name.split(" ");
  if (!piece) return values[name];
  const forward = values[piece];
  if (!byHand || kind === "F" || kind === "R") return forward;
  const backward = forward * values.ratio;
  if (kind === "B") return backward;
  const inputs = splits.has(piece) ? Math.min(forward, backward) : backward;  // the weights take what is left
  return kind === "I" ? inputs : backward - inputs;
}

function durationsOf(data, knobs, values) {  // of each task, with other times than the program came with
  if (knobs.every(knob => knob.value === values[knob.name])) return data.classOf.map(own => data.classes[own].time);
  const byHand = "ratio" in values, splits = new Set(knobs.filter(knob => knob.splits).map(knob => knob.name));
  const times = data.classes.map(({amounts}) =>
    Object.entries(amounts).reduce((sum, [name, amount]) => sum + amount * rate(name, byHand, values, splits), 0));
  return data.classOf.map(own => Math.max(0, times[own]));
}

// What a task waited for last: what it needs, or what ran before it on the same resource. -1 where it waited for nothing.
function heldUpBy(program, times, task) {
  let last = program.previous[task];
  for (const other of program.before[task])
    if (last < 0 || times.end[other] > times.end[last]) last = other;
  return last;
}

function criticalPath(program, times) {  // from the first task to the one that ends last
  let task = -1;
  for (const each of program.order) if (task < 0 || times.end[each] > times.end[task]) task = each;
  const path = [], seen = new Set();  // a recording's clocks may contradict each other
  for (; task >= 0 && !seen.has(task); task = heldUpBy(program, times, task)) {
    path.push(task);
    seen.add(task);
  }
  return path.reverse();
}

function slackOf(program, times) {  // how much later each task could end without the step taking longer
  const slack = new Float64Array(program.total);
  for (let place = program.order.length - 1; place >= 0; place--) {
    const task = program.order[place];
    let least = times.makespan - times.end[task];
    const follow = other => { least = Math.min(least, times.start[other] - times.end[task] + slack[other]); };
    if (program.next[task] >= 0) follow(program.next[task]);
    program.after[task].forEach(follow);
    slack[task] = least;
  }
  return slack;
}

function memorySteps(data, times, rank) {  // [time, device, host] of a rank, in turn, and the most of both
  const {at, device, host, static: [onDevice, onHost]} = data.memory.ranks[rank];
  const steps = [[0, onDevice, onHost]], most = [onDevice, onHost];
  let now = 0;
  at.forEach((moment, index) => {  // what a rank does in turn is not done earlier than what stands before it
    now = Math.max(now, (moment & 1 ? times.end : times.start)[moment >> 1]);
    const level = [now, device[index], host[index] ?? 0];
    steps.push(level);
    most.forEach((value, i) => { most[i] = Math.max(value, level[i + 1]); });
  });
  return {steps, most, least: [onDevice, onHost]};
}
