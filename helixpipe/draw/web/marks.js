// What is drawn over the boxes: the op in hand with its messages, the critical path, a circle of waits.

function boxOf(panel, task) {
  const strip = panel.stripOf(task);
  if (!strip) return null;
  const x = xOf(panel, panel.times.start[task]);
  return {x, y: strip.top, wide: Math.max(xOf(panel, panel.times.end[task]) - x, 1.5), tall: strip.height};
}

const middleOf = (panel, rank) => panel.rowOf[rank].top + panel.rowOf[rank].height / 2;

function arrow(pen, x1, y1, x2, y2, head = 7) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
  const angle = Math.atan2(y2 - y1, x2 - x1);
  pen.beginPath();
  pen.moveTo(x2, y2);
  for (const side of [-0.4, 0.4]) pen.lineTo(x2 - head * Math.cos(angle + side), y2 - head * Math.sin(angle + side));
  pen.fill();
}

function frame(panel, pen, task, colour, width = 2) {
  const box = boxOf(panel, task);
  if (!box) return;
  pen.strokeStyle = page.theme.paper;
  pen.lineWidth = width + 2;
  pen.strokeRect(box.x, box.y + 1, box.wide, box.tall - 2);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.strokeRect(box.x, box.y + 1, box.wide, box.tall - 2);
}

function drawMarks(panel, pen) {
  const {theme, settings} = page;
  if (panel.data.circle) drawCircle(panel, pen);
  if (settings.path && panel.path.length) drawPath(panel, pen);
  if (settings.messages) drawMessages(panel, pen);
  for (const held of [page.selected, page.hovered]) {
    if (!held) continue;
    if (held.panel === panel) drawHeld(panel, pen, held.task);
    else {  // the same op of another timeline
      const twin = held.panel.size === panel.size && held.task < held.panel.ops.rank.length
        ? panel.byCell.get(cellOf(held.panel, held.task)) : undefined;
      if (twin !== undefined) frame(panel, pen, twin, theme.accent);
    }
  }
}

function drawHeld(panel, pen, task) {  // the op in hand, what it waits for and who waits for it, with the messages
  const {theme} = page, {program, times} = panel;
  if (panel.data.circle) return frame(panel, pen, task, theme.ink);
  const travel = message => {
    const {source, target} = panel.whatIs(message);
    pen.strokeStyle = pen.fillStyle = theme.ink;
    pen.lineWidth = 1.3;
    arrow(pen, xOf(panel, times.start[message]), middleOf(panel, source), xOf(panel, times.end[message]), middleOf(panel, target));
  };
  for (const message of [...program.before[task], ...program.after[task]]) {
    const what = panel.whatIs(message);
    if (what.type === OPS) frame(panel, pen, message, theme.soft, 1.5);
    if (what.type !== MESSAGE) continue;
    frame(panel, pen, program.before[task].includes(message) ? what.producer : what.consumer, theme.soft, 1.5);
    travel(message);
  }
  if (panel.whatIs(task).type === MESSAGE && !panel.stripOf(task)) travel(task);  // its lane is not shown
  frame(panel, pen, task, theme.ink, 2.5);
}

function drawMessages(panel, pen) {  // all there are in view, if they can be told apart
  const {times, view} = panel, first = panel.ops.rank.length, shown = [];
  for (let task = first; task < first + panel.data.messages.length; task++)
    if (times.end[task] >= view.from && times.start[task] <= view.to) shown.push(task);
  panel.hiddenMessages = shown.length > 600 ? shown.length : 0;
  if (panel.hiddenMessages) return;
  pen.strokeStyle = pen.fillStyle = page.theme.ink;
  pen.globalAlpha = 0.55;
  pen.lineWidth = 0.8;
  for (const task of shown) {
    const {source, target} = panel.whatIs(task), down = target > source ? 0.42 : -0.42, tall = panel.rowHeight;
    arrow(pen, xOf(panel, times.start[task]), middleOf(panel, source) + down * tall,
      xOf(panel, times.end[task]), middleOf(panel, target) - down * tall, 5);
  }
  pen.globalAlpha = 1;
}

function drawPath(panel, pen) {  // from the first task to the last: each begins when the one before it has ended
  const foot = rank => panel.rowOf[rank].top + panel.rowOf[rank].height - 3;  // below the labels
  for (const [width, colour] of [[4, page.theme.paper], [2.2, page.theme.bad]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.beginPath();
    panel.path.forEach((task, index) => {
      const what = panel.whatIs(task), {start, end} = panel.times, from = foot(what.rank);
      if (index) pen.lineTo(xOf(panel, start[task]), from); else pen.moveTo(xOf(panel, start[task]), from);
      pen.lineTo(xOf(panel, end[task]), what.type === MESSAGE ? foot(what.target) : from);
    });
    pen.stroke();
  }
}

function drawCircle(panel, pen) {  // who waits for whom, round and round
  const {theme} = page;
  pen.strokeStyle = pen.fillStyle = theme.bad;
  panel.data.circle.forEach(([op, target, direct], index) => {
    const from = boxOf(panel, op), to = boxOf(panel, target), x1 = from.x + from.wide / 2, x2 = to.x + to.wide / 2;
    pen.lineWidth = 2;
    pen.setLineDash(direct ? [] : [5, 4]);
    if (from.y !== to.y) {  // to another rank: from edge to edge, a little beside the middle, for there may be two
      const down = to.y > from.y, beside = (down ? 1 : -1) * Math.min(8, from.wide / 4);
      return arrow(pen, x1 + beside, down ? from.y + from.tall : from.y, x2 + beside, down ? to.y : to.y + to.tall, 10);
    }
    const y = from.y + from.tall, low = y + 12 + 7 * (index % 2), dx = Math.sign(x2 - x1);
    pen.beginPath();
    pen.moveTo(x1 + dx * 4, y);
    pen.lineTo(x1 + dx * 8, low);
    pen.lineTo(x2 - dx * 8, low);
    pen.stroke();
    pen.setLineDash([]);
    arrow(pen, x2 - dx * 8, low, x2 - dx * 4, y, 10);
  });
  pen.setLineDash([]);
  for (const [op] of panel.data.circle) {
    const {x, y, wide, tall} = boxOf(panel, op);
    pen.strokeRect(x + 0.5, y + 1, Math.max(wide - 2, 1), tall - 2);
  }
}
