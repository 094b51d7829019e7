// The inputs of a panel.
import {shown} from "./state.js";

const NUMBERS = {
  p: ["ranks", 1, "Pipeline ranks p (-p)"],
  m: ["microbatches", 1, "Microbatches m a step (-m)"],
  k: ["chunks", 1, "Chunks k each sequence is cut into (-k); empty: 1, or what is found best for a schedule made for chunks"],
  L: ["layers", 1, "Layers L of the model (-L); empty: as few as fit, or the model's"],
  v: ["stages a rank", 1, "Stages v a rank (-v), of schedules that interleave; empty: the schedule's"],
  pre: ["norm, QKV", 0, "Time of norm and QKV in a layer's forward"],
  attn: ["attention", 0, "Time of core attention in a layer's forward"],
  post: ["MLP etc.", 0, "Time of projection and MLP in a layer's forward"],
  message: ["message", 0, "Time of a message between ranks"],
  tokens: ["tokens", 1, "Tokens of a sequence; empty: the model's"],
  tp: ["tensor parallel", 1, "GPUs of each pipeline rank"],
  limit: ["memory limit", 0, "What a rank may keep: GiB of a model, else microbatch-layers; empty: the GPU's, or none"],
};

export function buildControls(panel, removable) {
  const form = panel.part(".controls"), {choices} = panel.page;
  const add = (key, input, text, title, wide) => {
    const label = document.createElement("label");
    label.title = title;
    label.dataset.key = key;
    if (wide) label.className = "wide";
    label.append(text, input);
    input.name = key;
    form.append(label);
  };
  const select = (key, options, text, title) => {
    const input = document.createElement("select");
    input.append(...options.map(([value, name]) => new Option(name, value)));
    if (![...input.options].some(option => option.value === panel.state[key])) input.append(new Option(panel.state[key], panel.state[key]));
    input.value = panel.state[key];
    if (key === "schedule") input.className = "name";
    add(key, input, text, title, true);
  };
  const number = key => {
    const [text, least, title] = NUMBERS[key], input = document.createElement("input");
    Object.assign(input, {type: "number", min: least, step: least ? 1 : "any", value: panel.state[key], placeholder: "auto"});
    if (key === "tokens" || key === "limit") input.className = "long";
    add(key, input, text, title);
  };
  select("schedule", choices.schedules.map(each => [each.name, each.name]), "schedule", "The order of the work");
  ["p", "m", "k", "L", "v"].forEach(number);
  select("model", [["", "times by hand"], ...choices.models.map(each => [each.name, each.name])], "costs", "Times by hand, or of a model on hardware");
  ["pre", "attn", "post", "message"].forEach(number);
  select("hardware", choices.hardware.map(name => [name, name]), "GPUs", "The hardware that the model runs on");
  ["tokens", "tp", "limit"].forEach(number);
  const more = document.createElement("input");
  Object.assign(more, {type: "text", className: "flags", spellcheck: false, placeholder: "--recompute-granularity full", value: panel.state.more});
  add("more", more, "more flags of simulate", "Any other flags of helixpipe simulate", true);
  if (removable) form.append(removeButton(panel));
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("change", ({target}) => {
    const changes = {[target.name]: target.type === "number" && target.value !== "" ? +target.value : target.value.trim()};
    if (target.name === "model") {  // the sizes of the model that was chosen, not those of the one before
      const model = choices.models.find(each => each.name === target.value);
      Object.assign(changes, {L: model?.layers ?? "", tokens: model?.tokens ?? ""});
      for (const key of ["L", "tokens"]) form.elements[key].value = changes[key];
    }
    panel.change(changes);
  });
  fit(panel);
}

export function fit(panel) {  // what belongs to the chosen costs and schedule alone
  const {state, page: {choices}} = panel, costs = shown(state);
  const virtual = choices.schedules.find(each => each.name === state.schedule)?.virtual;
  for (const label of panel.element.querySelectorAll(".controls label")) {
    const {key} = label.dataset, ofCosts = ["pre", "attn", "post", "message", "hardware", "tokens", "tp"].includes(key);
    label.hidden = (ofCosts && !costs.includes(key)) || (key === "v" && !virtual && state.v === "");
  }
}

function removeButton(panel) {
  const button = document.createElement("button");
  Object.assign(button, {type: "button", className: "remove", textContent: "Remove"});
  button.addEventListener("click", () => panel.page.remove(panel));
  return button;
}
