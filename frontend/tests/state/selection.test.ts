import { describe, expect, it } from "vitest";
import type { MonitoredWhole, RunsAnswer, StepStats, WorkerEntry } from "../../src/api/types";
import { FOUND_BASE, keptBase, missingBase, pickAnother, resolveBase, resolveSelection, runBefore } from "../../src/state/selection";

const stats = (peak: number): StepStats => ({
  peak_bytes: peak,
  peak_time_ns: 0,
  start_bytes: 0,
  end_bytes: 0,
  window_peak_bytes: peak,
  peak_reserved_bytes: null,
  step_start_ns: 0,
  step_end_ns: 1,
  allocated_bytes: 0,
  allocations: 0,
  stayed_bytes: 0,
  stayed: 0,
  capacity_bytes: null,
});
const worker = (name: string, peaks: Record<number, number>, device = "cpu") => ({
  worker: name,
  model: "net",
  devices: [device],
  steps: Object.entries(peaks).map(([step, peak]) => ({
    step: Number(step),
    window: 0,
    devices: { [device]: stats(peak) },
  })),
});
const answer: RunsAnswer = {
  logdir: "",
  problems: [],
  runs: [
    { run: "empty", workers: [] },
    { run: "a", workers: [worker("rank0", { 1: 10, 2: 30, 3: 20 })] },
    { run: "b", workers: [worker("rank0", { 2: 5, 9: 50 })] },
  ],
};

describe("what is picked", () => {
  it("without a word is the step with the highest peak of the first run that has one", () => {
    expect(resolveSelection(answer, { view: "overview" })).toMatchObject({
      run: "a",
      worker: "rank0",
      device: "cpu",
      step: 2,
      missing: [],
    });
  });
  it("is of several runs the one that ended last", () => {
    const runs = answer.runs.map((run, i) => ({ ...run, end_ns: [0, 1.7e18, 1.8e18][i]! }));
    expect(resolveSelection({ ...answer, runs }, { view: "overview" })).toMatchObject({ run: "b", step: 9 });
  });
  it("is in another run its own highest step, but the step that was picked by hand", () => {
    const step = (picked: string) => pickAnother(answer, { view: "overview", run: "a", worker: "rank0", device: "cpu", step: picked }, { run: "b" })?.step;
    expect([step("2"), step("3")]).toEqual([9, 9]); // a peaks highest in step 2; b has no step 3
    expect(pickAnother(answer, { view: "overview", run: "b", worker: "rank0", device: "cpu", step: "2" }, { run: "a" })?.step).toBe(2);
  });
  it("is what was dumped when memory ran out, though a monitor saw a byte more", () => {
    const run = { run: "a", workers: [worker("oom_a", { 1: 10, 2: 30 }), { ...worker("dump", { 0: 29 }), dump_of: "oom_a" }] };
    expect(resolveSelection({ ...answer, runs: [run] }, { view: "overview" })).toMatchObject({ worker: "dump", step: 0, failed: true });
  });
  it("is of equal peaks the first", () => {
    const flat = { ...answer, runs: [{ run: "a", workers: [worker("rank0", { 3: 9, 4: 9, 5: 8 })] }] };
    expect(resolveSelection(flat, { view: "overview" })).toMatchObject({ step: 3 });
  });
  it("is what the URL says", () =>
    expect(resolveSelection(answer, { view: "overview", run: "b", step: "2" })).toMatchObject({ run: "b", step: 2 }));
  it("says what is not here", () =>
    expect(resolveSelection(answer, { view: "overview", run: "gone", step: "3" })).toMatchObject({
      run: "a",
      step: 3,
      missing: ["run gone"],
    }));
  it("is nothing where nothing is recorded", () =>
    expect(resolveSelection({ runs: [], problems: [], logdir: "" }, { view: "overview" })).toBeNull());
  it("is the last window's where several have the step", () => {
    const [first, second] = [worker("w", { 1: 90, 2: 10 }), worker("w", { 1: 20 })];
    const steps = [...first.steps, ...second.steps.map((s) => ({ ...s, window: 1 }))];
    const runs = [{ run: "r", workers: [{ ...first, steps }] }];
    const found = resolveSelection({ ...answer, runs }, { view: "overview" })!;
    expect(found.steps.map((s) => [s.step, s.window])).toEqual([[1, 1], [2, 0]]);
    expect([found.step, found.stats!.peak_bytes]).toEqual([1, 20]);
  });
  it.each([
    ["an accelerator to the host", { cpu: 99, shared: 98, "cuda:0": 9 }, "cuda:0"],
    ["what peaks highest of the host: not the batches in shared memory", { shared: 8, cpu: 99 }, "cpu"],
    ["nor the CPU of a model in shared memory", { shared: 99, cpu: 8 }, "shared"],
  ])("prefers %s", (_what, peaks, device) => {
    const of = Object.fromEntries(Object.entries(peaks).map(([name, bytes]) => [name, stats(bytes)]));
    const both = { ...worker("w", { 1: 9 }), devices: Object.keys(peaks), steps: [{ step: 1, window: 0, devices: of }] };
    expect(resolveSelection({ ...answer, runs: [{ run: "r", workers: [both] }] }, { view: "overview" })?.device).toBe(device);
  });
});

describe("what is offered", () => {
  it("counts rank2 before rank10", () => {
    const workers = ["rank10", "rank2", "rank1"].map((name) => worker(name, { 1: 1 }));
    const found = resolveSelection({ ...answer, runs: [{ run: "r", workers }] }, { view: "overview" });
    expect(found?.workers).toEqual(["rank1", "rank2", "rank10"]);
  });
  it("leaves out a run that recorded no device, and says so where it is asked for", () => {
    const hollow = { run: "hollow", workers: [{ worker: "w", devices: [], steps: [{ step: 0, window: 0, devices: {} }] }] };
    const runs = [hollow, ...answer.runs];
    const found = resolveSelection({ ...answer, runs }, { view: "overview", run: "hollow" });
    expect(found).toMatchObject({ run: "a", runs: ["a", "b"], missing: ["run hollow"], holdsNothing: true });
    expect(resolveSelection({ ...answer, runs: [hollow] }, { view: "overview" })).toBeNull();
  });
  it("is the window of the picked step, from its first step's start to its last one's end", () => {
    const spans = [
      { step: 1, window: 0, start: 0 },
      { step: 2, window: 0, start: 10 },
      { step: 7, window: 1, start: 3 },
    ];
    const steps = spans.map(({ step, window, start }) => ({
      step,
      window,
      devices: { cpu: { ...stats(1), step_start_ns: start, step_end_ns: start + 9 } },
    }));
    const runs = [{ run: "r", workers: [{ worker: "w", devices: ["cpu"], steps }] }];
    const of = (step: string) => resolveSelection({ ...answer, runs }, { view: "timeline", step })?.window;
    expect(of("2")).toMatchObject({ from: 0, to: 19, steps: [{ step: 1 }, { step: 2 }] });
    expect(of("7")).toMatchObject({ from: 3, to: 12, steps: [{ step: 7 }] });
  });
});

describe("what it is compared with", () => {
  const base = (route: object) => {
    const full = { view: "compare" as const, ...route };
    return resolveBase(answer, full, resolveSelection(answer, full)!);
  };
  it("is the step before", () => expect(base({ run: "a", step: "3" })).toMatchObject({ run: "a", step: 2 }));
  it("is the step after for the first", () => expect(base({ run: "a", step: "1" })).toMatchObject({ step: 2 }));
  it("is the same step of another run", () =>
    expect(base({ run: "a", step: "2", base_run: "b" })).toMatchObject({ run: "b", step: 2 }));
  it("is another run's step where this run has one alone", () => {
    const lone: RunsAnswer = {
      ...answer,
      runs: [{ run: "lone", workers: [worker("rank0", { 4: 1 })] }, ...answer.runs],
    };
    const picked = resolveSelection(lone, { view: "compare" })!;
    expect(picked.run).toBe("lone");
    expect(resolveBase(lone, { view: "compare" }, picked)).toMatchObject({ run: runBefore(lone, picked)! });
    expect(resolveBase({ ...lone, runs: lone.runs.slice(0, 1) }, { view: "compare" }, picked)).toBeNull();
  });
  it("stays with another run of the model, and goes with one of another model or kind of device", () => {
    const of = (model: string, device = "cpu") => ({ run: `${model}-${device}`, workers: [{ ...worker("rank0", { 1: 1 }, device), model }] });
    const runs = [of("net"), of("other"), of(""), of("net", "cuda:0")];
    const kept = (run: string, base_run?: string) => {
      const route = { view: "compare" as const, run };
      return keptBase({ ...answer, runs }, { ...route, ...(base_run === undefined ? {} : { base_run }) }, resolveSelection({ ...answer, runs }, route)!);
    };
    expect(["net-cpu", "-cpu", "gone", undefined].map((base) => kept("net-cpu", base))).toEqual([{}, {}, {}, {}]);
    expect(["other-cpu", "net-cuda:0"].map((base) => kept("net-cpu", base))).toEqual([FOUND_BASE, FOUND_BASE]);
  });
  it("is rather a run of the same folder", () => {
    const runs = ["a/x", "b/y", "b/z"].map((run) => ({ run, workers: [worker("rank0", { 1: 1 })] }));
    const picked = resolveSelection({ ...answer, runs }, { view: "compare", run: "b/z" })!;
    expect(resolveBase({ ...answer, runs }, { view: "compare", run: "b/z" }, picked)).toMatchObject({ run: "b/y" });
  });
  it("is nothing of another model, of one that is not known, or on another kind of device, unless it is asked for", () => {
    const lone = { run: "lone", workers: [worker("rank0", { 4: 1 })] };
    const others = [
      { run: "gpu", workers: [worker("rank0", { 4: 1 }, "cuda:0")] },
      { run: "other", workers: [{ ...worker("rank0", { 4: 1 }), model: "another" }] },
      { run: "snapshot", workers: [{ ...worker("rank0", { 4: 1 }), model: "" }] },
    ];
    const route = { view: "compare", run: "lone" } as const;
    const baseOf = (runs: RunsAnswer["runs"], more: object = {}) =>
      resolveBase({ ...answer, runs }, { ...route, ...more }, resolveSelection({ ...answer, runs }, route)!);
    for (const other of others) {
      expect(baseOf([lone, other])).toBeNull();
      expect(baseOf([lone, other], { base_run: other.run })).toMatchObject({ run: other.run });
    }
    const second = { run: "lone", workers: [...lone.workers, { ...worker("rank1", { 4: 1 }), model: "" }] };
    expect(baseOf([second])).toMatchObject({ worker: "rank1" });
  });
  it("says what the URL asks for and is not here", () => {
    const asked = { view: "compare" as const, run: "a", step: "3", base_run: "gone", base_step: "2" };
    const found = resolveBase(answer, asked, resolveSelection(answer, asked)!);
    expect(found).toMatchObject({ run: "a", step: 2 });
    expect(missingBase(asked, found)).toEqual(["run gone to compare with"]);
    expect(missingBase({ view: "compare" }, found)).toEqual([]);
    expect(missingBase({ view: "compare", base_step: "7" }, null)).toEqual(["step 7 to compare with"]);
  });
  it("is the URL's own choice", () => expect(base({ run: "a", step: "3", base_step: "1" })).toMatchObject({ step: 1 }));
});

describe("steps that a monitor saw", () => {
  const whole = (first: number, last: number, highest: number, bytes = 5): MonitoredWhole => ({
    kind: "allocator",
    capacity_bytes: null,
    count: last - first + 1,
    first,
    last,
    highest_step: highest,
    highest_bytes: bytes,
    retries: 0,
    ooms: 0,
    duration_ns: 1,
  });
  const only = { worker: "rank0", devices: [], steps: [], monitored: { "cuda:0": whole(0, 999, 77), process: whole(0, 999, 5, 4) } };
  const both = { ...worker("rank0", { 2: 30, 3: 20 }), monitored: { cpu: whole(0, 999, 77) } };
  const pickOf = (w: WorkerEntry, route: object = {}) =>
    resolveSelection({ ...answer, runs: [{ run: "r", workers: [w] }] }, { view: "overview", ...route });

  it("are picked where nothing is recorded, the highest first", () =>
    expect(pickOf(only)).toMatchObject({ device: "cuda:0", step: 77, stats: null, missing: [] }));
  it("are any that the URL names within what was seen", () =>
    expect(pickOf(only, { step: "998", device: "process" })).toMatchObject({ step: 998, device: "process", stats: null }));
  it("are not those that were not seen", () =>
    expect(pickOf(only, { step: "1000" })).toMatchObject({ step: 77, missing: ["step 1000"] }));
  it("give way to what is recorded, unless the URL names one", () => {
    expect(pickOf(both)).toMatchObject({ step: 2, stats: { peak_bytes: 30 }, monitored: { count: 1000 } });
    expect(pickOf(both, { step: "3" })).toMatchObject({ step: 3, stats: { peak_bytes: 20 } });
    expect(pickOf(both, { step: "4" })).toMatchObject({ step: 4, stats: null });
  });
  it("are nothing to compare with", () => {
    const runs = { ...answer, runs: [{ run: "r", workers: [only] }] };
    expect(resolveBase(runs, { view: "compare" }, resolveSelection(runs, { view: "compare" })!)).toBeNull();
  });
});

describe("the device to compare with", () => {
  const [here, there] = [worker("rank0", { 1: 30 }, "cuda:0"), worker("rank1", { 1: 20 }, "cuda:1")];
  const both: WorkerEntry = { ...here, devices: ["cuda:0", "cuda:1"], steps: [...here.steps, ...there.steps].slice(0, 1) };
  both.steps[0]!.devices = { ...here.steps[0]!.devices, ...there.steps[0]!.devices };
  const all = { ...answer, runs: [{ run: "r", workers: [both, there] }] };
  const baseOf = (base: object) => {
    const route = { view: "compare" as const, run: "r", worker: "rank0", device: "cuda:0", step: "1", base_run: "r", ...base };
    return resolveBase(all, route, resolveSelection(all, route)!);
  };
  it("is the named one, of the same worker too", () =>
    expect(baseOf({ base_worker: "rank0", base_device: "cuda:1", base_step: "1" })).toMatchObject({
      run: "r",
      worker: "rank0",
      device: "cuda:1",
      step: 1,
    }));
  it("is another worker's own, where that has no device of this name", () =>
    expect(baseOf({ base_worker: "rank1", base_device: "cuda:7" })).toMatchObject({ worker: "rank1", device: "cuda:1" }));
});

describe("the run to compare with", () => {
  const of = (...names: string[]): RunsAnswer => ({
    ...answer,
    runs: names.map((run) => ({ run, workers: [worker("rank0", { 1: 10 })] })),
  });
  const before = (all: RunsAnswer, run: string) => runBefore(all, { run, worker: "rank0", device: "cpu", step: 1 });
  it("is the one before by name, numbers in their order", () => {
    expect(before(of("day10", "day9", "day2"), "day10")).toBe("day9");
    expect(before(of("day10", "day9", "day2"), "day2")).toBe("day9");
  });
  it("is of the same folder where that has another", () => {
    expect(before(of("a/old", "b/1", "b/2"), "b/1")).toBe("b/2");
    expect(before(of("a/old", "b/1"), "b/1")).toBe("a/old");
  });
  it("has the device, and is another one", () => {
    expect(before(of("a"), "a")).toBeNull();
    const gpu = { run: "b", workers: [worker("rank0", { 1: 1 }, "cuda:0")] };
    expect(before({ ...answer, runs: [...of("a").runs, gpu] }, "a")).toBeNull();
  });
});
