// Finding ops by their names: 2F5, or 2F5.1 for a chunk. What is left out may be any: F5, 2F, B.

function parseName(text) {  // null where it is no name
  const found = /^(\d+)?([FBIWR])(\d+)?(?:\.(\d+))?$/i.exec(text.trim());
  if (!found) return null;
  const [stage, microbatch, chunk] = [found[1], found[3], found[4]].map(digits => digits && +digits);
  return {kind: found[2].toUpperCase(), stage, microbatch, chunk};
}

function opsNamed(panel, {kind, stage, microbatch, chunk}) {  // as they run, but the very name's first
  const {ops, times} = panel, found = [], is = (wanted, value) => wanted === undefined || wanted === value;
  for (let op = 0; op < ops.kind.length; op++)
    if (ops.kind[op] === kind && is(microbatch, ops.microbatch[op]) && is(stage, ops.stage[op]) && is(chunk, ops.chunk[op] ?? 0)) found.push(op);
  const other = op => microbatch !== undefined && chunk === undefined && !!ops.chunk[op];
  return found.sort((a, b) => other(a) - other(b) || times.start[a] - times.start[b] || a - b);
}

function findOps(text) {
  const name = parseName(text);
  page.found = {ops: [], at: -1};
  for (const panel of page.panels) {
    const ops = name ? opsNamed(panel, name) : [];
    panel.found = new Set(ops);
    for (const task of ops) page.found.ops.push({panel, task});
  }
  const {length} = page.found.ops;
  if (!length) for (const panel of page.panels) panel.found = null;
  element("found").textContent = !text.trim() ? "" : length ? count(length, "op") : name ? "none" : "no name";
  element("live").textContent = !text.trim() ? "" : length ? `${count(length, "op")} found. Enter goes to the ${length > 1 ? "first" : "op"}.`
    : name ? "No such op." : "This is no name of an op; 2F5 is one: stage, kind, microbatch.";
  element("found-next").disabled = element("found-before").disabled = !length;
  requestDraw();
}

function goToFound(by) {
  const {ops, at} = page.found, {length} = ops;
  if (!length) return;
  page.found.at = at < 0 ? (by > 0 ? 0 : length - 1) : (at + by + length) % length;
  const {panel, task} = ops[page.found.at], place = `${page.found.at + 1} of ${length}`;
  element("found").textContent = place;
  jump(panel, task, {before: place + ". "});
}

function startSearch() {
  const field = element("find");
  field.oninput = () => findOps(field.value);
  field.onkeydown = event => {
    if (event.key === "Enter") goToFound(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") {
      findOps(field.value = "");
      (page.selected?.panel ?? page.panels[0]).canvas.focus({preventScroll: true});
    } else return;
    event.preventDefault();
  };
  element("found-next").onclick = () => goToFound(1);
  element("found-before").onclick = () => goToFound(-1);
  document.addEventListener("keydown", event => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
}
