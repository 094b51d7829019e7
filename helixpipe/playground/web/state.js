// What is chosen, as an object a panel; in the address after #, and as flags of `helixpipe simulate`.

export const DEFAULTS = {
  schedule: "1f1b", p: 4, m: 8, k: "", L: "", v: "",
  model: "", pre: 1, attn: 3, post: 2, message: 0, hardware: "h100", tokens: "", tp: 1, limit: "", more: "",
};
const BY_HAND = ["pre", "attn", "post", "message"], OF_MODEL = ["hardware", "tokens", "tp"];
const EXAMPLE = {...DEFAULTS, L: 8, message: 0.5, moves: []};

export function firstState() {
  return [{...EXAMPLE}, {...EXAMPLE, schedule: "helix", moves: []}];
}

export function encode(panels) {
  return panels.map((state, number) => {
    const fields = Object.keys(DEFAULTS).filter(key => key === "schedule" || state[key] !== DEFAULTS[key]).map(key => `${key}=${encodeURIComponent(state[key])}`);
    if (state.moves.length) fields.push("moves=" + state.moves.map(move => move.join(".")).join("_"));
    return "ab"[number] + ":" + fields.join(";");
  }).join("&");
}

export function decode(hash) {  // panels of a link; those of the example where it says none
  const panels = hash.replace(/^#/, "").split("&").filter(text => /^[ab]:/.test(text)).slice(0, 2).map(text => {
    const state = {...DEFAULTS, moves: []};
    for (const field of text.slice(2).split(";")) {
      const [key, value] = [field.slice(0, field.indexOf("=")), decode1(field.slice(field.indexOf("=") + 1))];
      if (key === "moves") state.moves = value.split("_").map(move => move.split(".").map(Number)).filter(move => move.length === 3 && move.every(Number.isInteger));
      else if (key in DEFAULTS) state[key] = typeof DEFAULTS[key] === "number" && Number.isFinite(+value) ? +value : value;
    }
    return state;
  });
  return panels.length ? panels : firstState();
}

function decode1(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

export function question(state) {  // as helixpipe/cli/answers.py takes it
  const flags = ["-p", state.p, "-m", state.m], costs = [];
  if (state.k !== "") flags.push("-k", state.k);
  if (state.L !== "") flags.push("-L", state.L);
  if (state.v !== "") flags.push("-v", state.v);
  if (state.model) {
    costs.push("--model", state.model, "--hardware", state.hardware);
    if (state.tokens !== "") costs.push("--seq-length", state.tokens);
    if (String(state.tp) !== "1") costs.push("--tensor-parallel", state.tp);
  } else {
    if (["pre", "attn", "post"].some(key => +state[key] !== DEFAULTS[key]))
      costs.push("--piece-times", `pre=${state.pre},attn=${state.attn},post=${state.post}`);
    if (+state.message) costs.push("--message-time", state.message);
  }
  if (state.limit !== "") costs.push("--memory-limit", state.limit);
  flags.push(...state.more.split(/\s+/).filter(Boolean));
  return {schedule: state.schedule, flags: flags.map(String), costs: costs.map(String), moves: state.moves};
}

export function command(state) {
  const {schedule, flags, costs, moves} = question(state);
  const words = moves.length ? [schedule + "-edited.json", ...costs] : [schedule, ...flags, ...costs];
  return "helixpipe simulate " + words.map(word => /^[\w.,=:/-]+$/.test(word) ? word : `'${word}'`).join(" ");
}

export const shown = state => state.model ? OF_MODEL : BY_HAND;
