import { describe, expect, it } from "vitest";
import type { BandsAnswer } from "../../src/api/types";
import { halfOf, NOTHING, ownerAt, ownersOf } from "../../src/draw/bands";

/** Four columns: a 40 throughout, b 30 in the first two, c 20 from the second on; the rest on top of them. */
const answer: BandsAnswer = {
  over: "event",
  t0: 0,
  t1: 4,
  px: 4,
  min: [70, 70, 60, 60],
  max: [80, 100, 60, 70],
  bands: { row: [5, 6, 9], bytes: [40, 30, 20], first: [0, 0, 1], last: [3, 1, 3], key: [0, 0, 1], tensor: [null, null, null] },
  rest: [10, 10, 0, 10],
  others: 3,
  parts: [[10, 0, 0, 0], [0, 10, 0, 10]],
  keys: [],
  peak: { event: 1, time_ns: 1, bytes: 100, column: 1 },
  first_event: 0,
  last_event: 3,
};

/** A column from the bottom, a letter for each ten bytes. */
function column(at: number): string {
  const owners = ownersOf(answer, 10, 100);
  const names = new Map([[NOTHING, "."], [0, "a"], [1, "b"], [2, "c"], [3, "r"], [4, "s"]]);
  return Array.from({ length: 10 }, (_, row) => names.get(owners.of[(9 - row) * 4 + at]!)).join("");
}

describe("bands", () => {
  it("are stacked in order of birth, with the rest on top by its keys", () => {
    expect([0, 1].map(column)).toEqual(["aaaabbbr..", "aaaabbbccs"]);
  });
  it("sink when one below them goes", () => expect([2, 3].map(column)).toEqual(["aaaacc....", "aaaaccs..."]));
  it("tell who owns a place", () => {
    const owners = ownersOf(answer, 10, 100);
    expect(ownerAt(owners, 0.3, 0.95)).toBe(0);
    expect(ownerAt(owners, 0.3, 0.05)).toBe(4);
    expect(ownerAt(owners, 0.6, 0.05)).toBe(NOTHING);
    expect([ownerAt(owners, -0.1, 0.5), ownerAt(owners, 0.5, 1)]).toEqual([NOTHING, NOTHING]);
  });
  it("say how many make half of a moment", () => {
    expect(halfOf(answer, 1)).toEqual({ count: 2, bytes: 70 });
    expect(halfOf({ ...answer, max: [800, 800, 800, 800] }, 1)).toBeNull();
  });
});
