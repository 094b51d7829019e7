// Numbers and ops in words.

export const KINDS = {F: "forward", B: "backward", I: "gradient of the input", W: "gradient of the weights", R: "forward again"};

export function short(value) {
  return String(Number(value.toPrecision(4)));
}

export function duration(value, unit) {  // 396, 1.25 s, 12.5 ms
  if (unit !== "s" || !value) return short(value);
  if (value >= 1) return short(value) + " s";
  return value >= 1e-3 ? short(value * 1e3) + " ms" : short(value * 1e6) + " µs";
}

export function percent(share, digits = 1) {
  return (100 * share).toFixed(digits) + " %";
}

export function memory(value, unit) {
  return unit === "bytes" ? (value / 2 ** 30).toFixed(1) + " GiB" : short(value);
}

export function describe(step, op) {  // an op in one sentence
  const {ops} = step, chunk = step.chunked ? `, chunk ${ops.chunk[op]}` : "";
  const place = `${ops.cell[op]}: ${KINDS[ops.kind[op]]} of microbatch ${ops.microbatch[op]}${chunk} on stage ${ops.stage[op]}, rank ${ops.rank[op]}`;
  if (!ops.start) return place + (step.ended[op] ? " (it ends)" : " (it never starts)");
  return `${place}; from ${duration(ops.start[op], step.unit)} to ${duration(ops.end[op], step.unit)}`;
}
