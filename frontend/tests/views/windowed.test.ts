import { expect, it } from "vitest";
import { nextSorting, readSorting } from "../../src/views/modules/columns";
import { rowsInSight } from "../../src/views/windowed";

it("of ten thousand rows only those in sight are made, and the heights stay", () => {
  const sight = rowsInSight(10_000, 31, 31 * 5000, 620);
  expect([sight.first, sight.last]).toEqual([4992, 5028]);
  expect(sight.above + (sight.last - sight.first) * 31 + sight.below).toBe(310_000);
});

it("a short table is all there", () =>
  expect(rowsInSight(5, 31, 0, 900)).toEqual({ first: 0, last: 5, above: 0, below: 0 }));

it("a table that shrank while scrolled down shows its end", () =>
  expect(rowsInSight(3, 31, 5000, 600)).toMatchObject({ first: 3, last: 3, below: 0 }));

it("a column sorts downwards, upwards, then as the model is", () => {
  const first = nextSorting(null, "forward");
  const second = nextSorting(readSorting(first, "peak"), "forward");
  const third = nextSorting(readSorting(second, "peak"), "forward");
  expect([first, second, third]).toEqual(["forward", "-forward", "model"]);
  expect(readSorting("model", "peak")).toBeNull();
  expect(readSorting("when", "peak")).toEqual({ id: "bytes", descending: true });
  expect(readSorting("when", "highest")).toEqual({ id: "when", descending: true });
  expect(readSorting("nonsense", "peak")).toEqual({ id: "bytes", descending: true });
});
