// node run.mjs FOLDER <questions.json: the answers of the playground's Python, as the page's worker starts it.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const folder = process.argv[2];
const {loadPyodide} = await import(pathToFileURL(folder + "/pyodide/pyodide.mjs"));
const python = await loadPyodide({indexURL: folder + "/pyodide/"});
python.unpackArchive(new Uint8Array(readFileSync(folder + "/python.zip")), "zip", {extractDir: "/core"});
const start = readFileSync(folder + "/worker.js", "utf8").match(/runPython\(`([^`]*)`\)/)[1];
const answers = python.runPython(start);
const told = JSON.parse(readFileSync(0, "utf8")).map(question => {
  const text = JSON.stringify(question), answer = JSON.parse(answers.answer(text));
  return {answer, bound: answer.error ? null : JSON.parse(answers.bound(text))};
});
process.stdout.write(JSON.stringify(told));
