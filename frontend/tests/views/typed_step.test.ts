import { describe, expect, it } from "vitest";
import { nearestStep } from "../../src/views/typed_step";

describe("a typed step", () => {
  it("is the nearest that there is, of two equally near the lower", () => {
    const steps = [10, 20, 40];
    expect([0, 10, 14, 15, 16, 31, 99].map((typed) => nearestStep(steps, typed))).toEqual([10, 10, 10, 10, 20, 40, 40]);
  });
});
