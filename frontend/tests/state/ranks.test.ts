import { describe, expect, it } from "vitest";
import type { Rank, RanksAnswer } from "../../src/api/types";
import { unitFor } from "../../src/state/bytes";
import {
  cellOf,
  colorRange,
  figuresOf,
  ordered,
  ORDERS,
  overMedian,
  rankName,
  ranksSentence,
  shortNames,
} from "../../src/state/ranks";
import { readOrder } from "../../src/state/route";
import { plain } from "../../src/state/sentences";

const GIB = 1 << 30;

/** A rank with a peak in each of the steps 0, 1, 2 …, in GiB; null where it has none. */
function rank(worker: string, peaks: (number | null)[], more: Partial<Rank> = {}): Rank {
  const bytes = peaks.map((peak) => (peak === null ? null : peak * GIB));
  const known = bytes.filter((value) => value !== null);
  const highest_bytes = Math.max(...known);
  return {
    worker,
    device: "cuda:0",
    capacity_bytes: null,
    count: known.length,
    highest_bytes,
    highest_step: bytes.lastIndexOf(highest_bytes),
    at_least: false,
    recorded: true,
    lowest_bytes: Math.min(...known),
    lowest_step: bytes.indexOf(Math.min(...known)),
    median: null,
    bytes,
    steps: null,
    ...more,
  };
}

function answer(rows: Rank[], more: Partial<RanksAnswer> = {}): RanksAnswer {
  const steps = rows[0]!.bytes.map((_, step) => step);
  return { of: "allocated", offered: ["allocated"], count: steps.length, first: steps, last: steps, rows, ...more };
}

function median(worker: string, peak: number): Rank["median"] {
  return { worker, device: "cuda:0", bytes: peak * GIB, recorded: true };
}

function told(of: RanksAnswer): string {
  return plain(ranksSentence(of, unitFor(16 * GIB)));
}

describe("the sentence on ranks", () => {
  const three = [rank("rank0", [8, 8]), rank("rank1", [9, 12], { median: median("rank2", 10) }), rank("rank2", [8, 10])];
  it("says which peaks highest, when, and how far above the median rank", () =>
    expect(told(answer(three))).toBe("rank1 peaks highest: 12.00 GiB at step 1, 2.00 GiB (20.0 %) above the median rank."));
  it("names the other of two", () => {
    const two = [rank("a", [8, 8]), rank("b", [9, 12], { median: median("a", 8) })];
    expect(told(answer(two))).toBe("b peaks highest: 12.00 GiB at step 1, 4.00 GiB (50.0 %) above a.");
  });
  it("says so where all are equal, nearly or to the byte", () => {
    expect(told(answer([rank("a", [8]), rank("b", [8]), rank("c", [8])]))).toBe(
      "All 3 ranks peak at the same 8.00 GiB, to the byte.",
    );
    const nearly = [rank("a", [8, 16]), rank("b", [8, 15.875])];
    expect(told(answer(nearly))).toBe("Both ranks peak within 0.8 % of one another: a highest, with 16.00 GiB at step 1.");
  });
  it("says where no other rank has the step, or half of them have as much", () => {
    expect(told(answer([rank("a", [8, 12]), rank("b", [8, null])]))).toBe(
      "a peaks highest: 12.00 GiB at step 1; no other rank has that step.",
    );
    const half = [rank("a", [12, 8], { median: median("b", 12) }), rank("b", [12, 8]), rank("c", [9, 9])];
    expect(told(answer(half))).toBe("a peaks highest: 12.00 GiB at step 0, as much as the median rank.");
  });
  it("of one step that nobody marked says no step, of the reserve says reserve, of a bound says at least", () => {
    const one = [rank("a", [8], { median: median("b", 4), at_least: true }), rank("b", [4])];
    expect(told(answer(one, { of: "reserved" }))).toBe("a reserves most: ≥ 8.00 GiB, 4.00 GiB (100.0 %) above b.");
  });
  it("of processes says that the memory is resident", () => {
    const two = [rank("a", [8, 8], { device: "process" }), rank("b", [8, 8], { device: "process" })];
    expect(told(answer(two))).toBe("Both ranks peak at the same 8.00 GiB of resident memory, to the byte.");
  });
  it("names devices where a worker has several", () => {
    const two = [rank("a", [8]), rank("a", [4], { device: "cuda:1" })];
    expect(rankName(two[1]!, two)).toBe("cuda:1");
    expect(rankName(two[1]!, [...two, rank("b", [8])])).toBe("a cuda:1");
    expect(rankName(two[1]!, [two[1]!])).toBe("a");
    expect(shortNames(two, 32)).toEqual(["cuda:0", "cuda:1"]);
  });
});

describe("a cell of the map", () => {
  const rows = [rank("a", [1, 4]), rank("b", [2, null]), rank("c", [3, 6]), rank("d", [9, 5])];
  it("is found by worker, device and step", () => {
    expect(cellOf(answer(rows), { worker: "c", device: "cuda:0", step: 1 })).toEqual({ row: 2, column: 1 });
    expect(cellOf(answer(rows), { worker: "c", device: "cpu", step: 1 })).toBeNull();
    expect(cellOf(answer(rows), { worker: "c", device: "cuda:0", step: 7 })).toBeNull();
  });
  it("stands against the lower middle of the ranks that have the step", () => {
    expect(figuresOf(answer(rows), { row: 3, column: 0 })).toMatchObject({ bytes: 9 * GIB, median: 2 * GIB, ranks: 4, step: 0 });
    expect(figuresOf(answer(rows), { row: 0, column: 1 })).toMatchObject({ median: 5 * GIB, ranks: 3 });
    expect(figuresOf(answer(rows), { row: 1, column: 1 })).toMatchObject({ bytes: null, step: null });
  });
  it("of a column of many steps names the one of the highest", () => {
    const binned = answer([rank("a", [4], { steps: [17] }), rank("b", [5], { steps: [12] })], { first: [10], last: [19] });
    expect(figuresOf(binned, { row: 0, column: 0 })).toMatchObject({ step: 17, first: 10, last: 19 });
    expect(cellOf(binned, { worker: "b", device: "cuda:0", step: 13 })).toEqual({ row: 1, column: 0 });
  });
  it("is colored so that a thousandth is no cliff", () => {
    expect(colorRange(answer([rank("a", [100, 99.9])]), false)).toEqual([92 * GIB, 100 * GIB]);
    expect(colorRange(answer([rank("a", [10, 100, null])]), false)).toEqual([10 * GIB, 100 * GIB]);
    expect(colorRange(answer([rank("a", [10])]), true)).toEqual([0, 1]);
  });
});

describe("the order of the table", () => {
  const rows = [
    rank("rank0", [3, 1], { median: median("rank2", 2) }),
    rank("rank2", [5, 5], { median: median("rank2", 5) }),
    rank("rank10", [4, 1]),
  ];
  const names = (text?: string): string[] => ordered(rows, text).map((row) => row.worker);
  it("is the highest first, and by name rank2 before rank10", () => {
    expect(names()).toEqual(["rank2", "rank10", "rank0"]);
    expect(names("worker")).toEqual(["rank0", "rank2", "rank10"]);
    expect(names("-worker")).toEqual(["rank10", "rank2", "rank0"]);
    expect(names("spread")).toEqual(["rank10", "rank0", "rank2"]);
  });
  it("puts what is not known last", () => expect(names("median")).toEqual(["rank0", "rank2", "rank10"]));
  it("bears whatever an address says", () => expect(readOrder("-nonsense", ORDERS, "highest")).toEqual({ by: "highest", turned: false }));
  it("knows what is above the median", () => expect(rows.map(overMedian)).toEqual([GIB, 0, null]));
});

describe("names beside the map", () => {
  it("keep the device of a worker whose name is too long", () => {
    const worker = "gke-training-pool-a100-europe-west4-node-17.c.my-company.internal_31337";
    const rows = [rank(worker, [1]), rank(worker, [2], { device: "cuda:1" }), rank("b", [1])];
    expect(shortNames(rows, 32)).toEqual(["gke-training…ternal_31337 cuda:0", "gke-training…ternal_31337 cuda:1", "b cuda:0"]);
    expect(shortNames(rows, 4)).toEqual(["gk…37 cuda:0", "gk…37 cuda:1", "b cuda:0"]);
  });
  it("lose what all workers begin with, up to a mark between words, where they are too long", () => {
    const rows = ["node-17.cluster_pid410_rank0", "node-17.cluster_pid411_rank1"].map((name) => rank(name, [1]));
    expect(shortNames(rows, 20)).toEqual(["…pid410_rank0", "…pid411_rank1"]);
    expect(shortNames(rows, 28)).toEqual(["node-17.cluster_pid410_rank0", "node-17.cluster_pid411_rank1"]);
    const other = [...rows, rank("b", [1])];
    expect(shortNames(other, 12)).toEqual(["node-1…rank0", "node-1…rank1", "b"]);
  });
});
