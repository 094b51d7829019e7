// Pointing, moving, keys.

function setView(view, from, to) {
  const span = Math.min(Math.max(to - from, view.full * 1e-5), view.full);
  view.from = Math.min(Math.max(from, 0), view.full - span);
  view.to = view.from + span;
  requestDraw(view.panels);
}

function zoom(view, factor, at = (view.from + view.to) / 2) {
  setView(view, at - (at - view.from) * factor, at + (view.to - at) * factor);
}

function pan(view, part) {
  const by = (view.to - view.from) * part;
  setView(view, view.from + by, view.to + by);
}

function bringIntoView(panel, task, move) {  // its row; with `move` its time, too
  const {view, times} = panel, span = view.to - view.from, start = times.start[task], end = times.end[task];
  if (move && (start < view.from || end > view.to)) {
    const middle = (start + end) / 2, wide = Math.max(span, Math.min(view.full, 2 * (end - start)));
    setView(view, middle - wide / 2, middle + wide / 2);
  }
  if (!panel.strips) return;
  const strip = panel.stripOf(task) ?? panel.rowOf[panel.whatIs(task).rank];
  const box = panel.canvas.getBoundingClientRect(), y = box.top + strip.top, bar = Math.max(0, element("bar").getBoundingClientRect().bottom);
  const bottom = lowest();
  if (y < bar || y + strip.height > bottom) scrollBy({top: y - (bar + bottom) / 2, behavior: "instant"});
}

const stripAt = (panel, y) => panel.strips?.find(each => each.top <= y && y < each.top + each.height);

function taskAt(panel, x, y) {
  const strip = stripAt(panel, y);
  if (!strip || x < LEFT || x > LEFT + plotWidth(panel)) return -1;
  const time = timeAt(panel, x), index = panel.firstEndingAfter(strip.tasks, time), task = strip.tasks[index];
  if (task !== undefined && panel.times.start[task] <= time) return task;
  const near = [strip.tasks[index - 1], task].filter(each => each !== undefined);  // thin ones are hard to hit
  return near.find(each => {
    const box = boxOf(panel, each);
    return x >= box.x - 2 && x <= box.x + box.wide + 2;
  }) ?? -1;
}

function memoryAt(panel, x, y) {  // in words, where the pointer is over a rank's memory
  const strip = stripAt(panel, y);
  if (!strip || (strip.type !== "device" && strip.type !== "host") || x < LEFT) return "";
  const {steps, most} = panel.memory[strip.rank], which = strip.type === "host" ? 2 : 1, time = timeAt(panel, x);
  let level = steps[0];
  for (const step of steps) if (step[0] <= time) level = step; else break;
  const unit = panel.data.memory.unit;
  return `Memory of rank ${strip.rank} on its ${strip.type}\n${memoryText(level[which], unit)} at ${timeText(time, panel.unit)}` +
    `, at most ${memoryText(most[which - 1], unit)}` + (unit === "bytes" ? "" : `\nin ${unit}`);
}

function point(panel, event) {
  const box = panel.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const task = taskAt(panel, x, y), before = page.hovered;
  page.hovered = task < 0 ? null : {panel, task};
  const strip = stripAt(panel, y), known = page.selected?.panel === panel && page.selected.task === task;  // its details are shown
  const text = event.buttons || known ? "" : task < 0 ? memoryAt(panel, x, y) : lines(panel, task).join("\n");
  if (text) showTip(text, event.clientX, box.top + strip.top, box.top + strip.top + strip.height); else showTip("");
  if (before?.task !== page.hovered?.task || before?.panel !== page.hovered?.panel) requestDraw();
}

function listen(panel) {
  const {canvas, view} = panel;
  let grabbed = null, moved = 0;
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey && !event.deltaX && document.activeElement !== canvas) return;  // the page scrolls
    event.preventDefault();
    showTip("");
    const sideways = event.deltaX || (event.shiftKey && event.deltaY);
    if (sideways && Math.abs(sideways) >= Math.abs(event.shiftKey ? 0 : event.deltaY)) pan(view, sideways / plotWidth(panel));
    else zoom(view, Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.002))), timeAt(panel, event.offsetX));
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => {
    [grabbed, moved] = [event.clientX, 0];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (grabbed !== null && event.clientX !== grabbed) {
      moved += Math.abs(event.clientX - grabbed);
      if (moved > 3) pan(view, (grabbed - event.clientX) / plotWidth(panel));
      grabbed = event.clientX;
    }
    point(panel, event);
  });
  canvas.addEventListener("pointerup", event => {
    const box = canvas.getBoundingClientRect();
    if (grabbed !== null && moved <= 3)
      select(panel, taskAt(panel, event.clientX - box.left, event.clientY - box.top), {move: false});
    grabbed = null;
    showTip("");
  });
  canvas.addEventListener("pointercancel", () => { grabbed = null; });
  canvas.addEventListener("pointerleave", () => {
    page.hovered = null;
    showTip("");
    requestDraw();
  });
  canvas.addEventListener("dblclick", () => setView(view, 0, view.full));
  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = keysOf(panel)[(event.shiftKey ? "Shift+" : "") + event.key] ?? keysOf(panel)[event.key];
    if (!action) return;
    event.preventDefault();
    showTip("");
    action();
  });
}

function keysOf(panel) {
  const {view} = panel, held = page.selected?.panel === panel ? page.selected.task : -1;
  const go = task => { if (task !== undefined && task >= 0) select(panel, task); };
  const along = by => {
    const {tasks} = held < 0 ? firstStrip(panel) : panel.stripOf(held) ?? firstStrip(panel);
    go(held < 0 ? tasks[panel.firstEndingAfter(tasks, view.from)] : tasks[tasks.indexOf(held) + by]);
  };
  const across = by => go(held < 0 ? firstStrip(panel).tasks[0] : nearest(panel, held, by));
  const ends = index => go((held < 0 ? firstStrip(panel) : panel.stripOf(held) ?? firstStrip(panel)).tasks.at(index));
  return {
    ArrowRight: () => along(1), ArrowLeft: () => along(-1), ArrowDown: () => across(1), ArrowUp: () => across(-1),
    Home: () => ends(0), End: () => ends(-1), Escape: () => select(panel, -1),
    w: () => jump(panel, held < 0 ? panel.path.at(-1) : causeOf(panel, held)),
    n: () => jump(panel, held < 0 ? panel.path[0] : behind(panel, panel.program.after[held][0] ?? panel.program.next[held], true)),
    b: goBack,
    "Shift+ArrowRight": () => pan(view, 0.2), "Shift+ArrowLeft": () => pan(view, -0.2),
    "+": () => zoom(view, 0.7), "=": () => zoom(view, 0.7), "-": () => zoom(view, 1 / 0.7), "0": () => setView(view, 0, view.full),
  };
}

const firstStrip = panel => panel.rowOf.find(strip => strip.tasks.length) ?? {tasks: []};

function nearest(panel, task, by) {  // the task of the next row or lane, up or down, that is closest in time
  const {times, strips} = panel, middle = (times.start[task] + times.end[task]) / 2;
  for (let at = strips.indexOf(panel.stripOf(task)) + by; at >= 0 && at < strips.length; at += by) {
    const {tasks} = strips[at];
    if (!tasks.length) continue;
    const place = Math.min(panel.firstEndingAfter(tasks, middle), tasks.length - 1), before = tasks[Math.max(place - 1, 0)];
    const far = each => Math.max(times.start[each] - middle, middle - times.end[each]);
    return far(before) < far(tasks[place]) ? before : tasks[place];
  }
  return task;
}
