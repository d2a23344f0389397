// The imagined runs: ordinary ones, and those that have broken viewers like this before.
import { trainStep, transformer } from "./training.mjs";

const GiB = 2 ** 30;
const made = new Map();

function run({ name, device = "cuda:0", steps, layers, width, batch, grow = 0, capacity = 80 * GiB, model, ...rest }) {
  const m = model ?? transformer({ layers, width });
  const list = [];
  let before = [];
  let start = 1000;
  for (let step = 0; step < steps; step++) {
    const b = step >= 12 ? batch * 1.35 : batch;
    const s = trainStep(m, {
      start,
      step,
      batch: b,
      firstStep: step === 0,
      leak: step % 7 === 6 ? grow : 0,
      seed: step + 1,
      before,
    });
    list.push(s);
    before = s.after;
    start = s.end + 50000;
  }
  return { run: name, device, steps: list, model: m, capacity, ...rest };
}

const RECIPES = {
  baseline: () =>
    run({
      name: "demo/baseline",
      steps: 40,
      layers: 12,
      width: 900,
      batch: 1900,
      grow: 3 * 2 ** 20,
      notes: [
        {
          level: "info",
          text: "214 of 6,769 allocations (0.4 % of the bytes at the peak) have no Python frame and are counted under the operator that made them.",
        },
        {
          level: "warning",
          text: "1 event came after its allocation was already freed; it is counted, and changes no total.",
        },
      ],
    }),
  bigger: () => run({ name: "demo/bigger-batch", steps: 6, layers: 12, width: 900, batch: 2900 }),
  cpu: () => run({ name: "demo/cpu", device: "cpu", capacity: null, steps: 5, layers: 4, width: 300, batch: 800 }),
  one: () => run({ name: "demo/one-step", steps: 1, layers: 6, width: 500, batch: 900 }),
  coarse: () =>
    run({
      name: "demo/side-file-missing",
      steps: 3,
      layers: 6,
      width: 500,
      batch: 900,
      coarse: true,
      notes: [{ level: "warning", text: "The side file is missing: the curve is coarse and moments cannot be shown." }],
    }),
  many: () => run({ name: "demo/5000-modules", steps: 2, layers: 1000, width: 100, batch: 100 }),
  hostile: () =>
    run({
      name: "<script>alert(1)</script>\n\u0000\u202egnp.evil" + "/very/long".repeat(40),
      steps: 3,
      width: 300,
      batch: 500,
      model: transformer({
        layers: 3,
        width: 300,
        root: "<img src=x onerror=alert(1)>",
        weird: [
          "<script>alert('x')</script>",
          "a\nb\u0000c\u202edcb",
          "long_".repeat(2000),
          "__proto__",
          "constructor",
        ],
      }),
      notes: [{ level: "warning", text: "<b>not bold</b> <script>alert(1)</script>" }],
    }),
};

export function runsFor(scenario) {
  if (scenario === "empty") return [];
  const names = scenario === "problems" ? ["baseline"] : Object.keys(RECIPES);
  return names.map((name) => {
    if (!made.has(name)) made.set(name, RECIPES[name]());
    return made.get(name);
  });
}
