import { expect, test } from "vitest";
import type { FleetRun } from "../../src/api/types";
import { causeGroups, fleetSentence, headroom, highestSentence, inFleetOrder, otherRanks, rankToOpen, withText } from "../../src/state/fleet";
import { plain } from "../../src/state/sentences";

const MIB = 1 << 20;

function run(name: string, more: Partial<FleetRun> = {}): FleetRun {
  return {
    run: name,
    ranks: 1,
    worker: "rank0",
    device: "cuda:0",
    step: 3,
    peak_bytes: 40 * MIB,
    at_least: false,
    capacity_bytes: 80 * MIB,
    process: null,
    median: null,
    growth_bytes: 0,
    growing: null,
    failed: null,
    failed_known: true,
    steps: 4,
    first: 0,
    last: 3,
    curve: [1000],
    ...more,
  };
}

function out(name: string, line: string | null): FleetRun {
  return run(name, { failed: { count: 1, worker: "rank0", device: "cuda:0", step: 3, requested_bytes: 7, line } });
}

const grows = { growth_bytes: 4 * MIB, growing: { worker: "rank1", device: "cuda:0", bytes: 4 * MIB } };

test("the sentence says how many ran out, at which line most of them, and how many grow", () => {
  const rows = [out("a", "x.py:1 (f)"), out("b", "x.py:1 (f)"), out("c", "y.py:2 (g)"), out("d", null), run("e", grows), run("f")];
  expect(plain(fleetSentence(rows))).toBe(
    "4 of 6 runs ran out of memory, 2 of them at the same line, x.py:1 (f). 1 more grows step after step.",
  );
  expect(causeGroups(rows).map(({ count, line, cause }) => [count, line, cause])).toEqual([
    [2, "x.py:1 (f)", "failed"],
    [1, null, "failed"],
    [1, "y.py:2 (g)", "failed"],
    [1, null, "growth"],
  ]);
  expect(plain(fleetSentence([run("a", grows), run("b")]))).toBe("None of 2 runs ran out of memory. 1 of 2 grows step after step.");
});

test("what was not recorded is not called none", () => {
  const old = run("old", { failed_known: false });
  expect(plain(fleetSentence([old, run("new")]))).toBe("No run of 2 is known to have run out of memory.");
  expect(headroom(run("a", { capacity_bytes: null }))).toBeNull();
});

test("causes come first and together, then orders by any column, the least headroom first", () => {
  const rows = [run("run10"), run("run9", { peak_bytes: 60 * MIB }), out("z", "b"), out("y", "a"), run("g", grows)];
  const names = (order?: string): string[] => inFleetOrder(rows, order).map((row) => row.run);
  expect(names()).toEqual(["y", "z", "g", "run9", "run10"]);
  expect(names("headroom")[0]).toBe("run9");
  expect(names("-peak").at(-1)).toBe("run9");
  expect(names("run")).toEqual(["g", "run9", "run10", "y", "z"]);
  expect(withText(rows, "RUN1").map((row) => row.run)).toEqual(["run10"]);
});

test("other ranks: which peaks highest, by how much, and which grows, seen from any rank", () => {
  const row = run("ddp", { ranks: 2, worker: "rank1", peak_bytes: 30 * MIB, median: { worker: "rank0", device: "cuda:0", bytes: 20 * MIB }, ...grows });
  expect(plain(otherRanks(row, { worker: "rank0", device: "cuda:0" }))).toBe(
    "rank1 peaks highest of 2 ranks: 30.00 MiB at step 3, 50.0 % above rank0. It grows by 4.00 MiB with every step.",
  );
  expect(rankToOpen(row, { worker: "rank0", device: "cuda:0" })).toEqual({ worker: "rank1", device: "cuda:0", step: "3" });
  expect(rankToOpen(row, { worker: "rank1", device: "cuda:0" })).toBeNull();
  const even = run("ddp", { ranks: 8, median: { worker: "rank2", device: "cuda:0", bytes: 40 * MIB } });
  expect(otherRanks(even, { worker: "rank0", device: "cuda:0" })).toEqual([]);
  const small = { ...even, ...grows };
  expect(plain(otherRanks(small, { worker: "rank0", device: "cuda:0" }))).toBe("rank1 grows by 4.00 MiB with every step.");
  expect(rankToOpen(small, { worker: "rank0", device: "cuda:0" })).toEqual({ worker: "rank1", device: "cuda:0" });
});

test("other devices of a single worker go by their own names", () => {
  const row = run("dump", { ranks: 3, worker: "dump", device: "cuda:1", peak_bytes: 30 * MIB, median: { worker: "dump", device: "cuda:2", bytes: 20 * MIB } });
  expect(plain(otherRanks(row, { worker: "dump", device: "cuda:0" }, "device"))).toBe(
    "cuda:1 peaks highest of 3 devices: 30.00 MiB at step 3, 50.0 % above the median device.",
  );
});

test("the highest peak and the largest process are two numbers, and a process is no peak of allocated memory", () => {
  const process = { worker: "w", step: 9, bytes: 3584 * MIB };
  const onCpu = run("a", { device: "cpu", peak_bytes: 101 * MIB, capacity_bytes: null, process });
  const watched = run("b", { device: "process", peak_bytes: 460 * MIB, capacity_bytes: null, process: { ...process, bytes: 460 * MIB } });
  const larger = "The process of a is highest: 3.50 GiB resident.";
  expect(plain(highestSentence([watched, onCpu]))).toBe(`a peaks highest: 101.0 MiB. ${larger}`);
  expect(plain(highestSentence([watched]))).toBe("The process of b is highest: 460.0 MiB resident.");
  expect(plain(highestSentence([run("c")]))).toBe("c peaks highest: 40.00 MiB, 40.00 MiB below the 80.00 MiB of its device.");
  expect(inFleetOrder([watched, onCpu], "peak").map((row) => row.run)).toEqual(["a", "b"]);
  expect(inFleetOrder([run("c"), watched, onCpu], "resident").map((row) => row.run)).toEqual(["a", "b", "c"]);
});
