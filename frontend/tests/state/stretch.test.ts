import { describe, expect, it } from "vitest";
import type { RunsAnswer } from "../../src/api/types";
import { resolveSelection } from "../../src/state/selection";
import { stretchOf } from "../../src/state/stretch";

const stats = (start: number, peak: number): object => ({
  peak_bytes: peak,
  peak_time_ns: start + 1,
  step_start_ns: start,
  step_end_ns: start + 10,
});

const answer = {
  logdir: "logs",
  problems: [],
  runs: [
    {
      run: "r",
      workers: [
        {
          worker: "w",
          devices: ["cpu"],
          steps: [
            { step: 1, window: 0, devices: { cpu: stats(0, 999) } },
            { step: 5, window: 1, devices: { cpu: stats(100, 30) } },
            { step: 6, window: 1, devices: { cpu: stats(110, 20) } },
          ],
        },
      ],
    },
  ],
} as unknown as RunsAnswer;

const picked = resolveSelection(answer, { view: "stacks", run: "r", step: "6" })!;

describe("what a view of time shows", () => {
  it("is the picked step", () => {
    const one = stretchOf(picked, { view: "stacks" }, false)!;
    expect(one).toMatchObject({ from: 110, to: 120, peak: { bytes: 20, time: 111 }, name: "step 6", whole: false });
    expect(one.query).not.toHaveProperty("span");
  });

  it("is the whole window with the highest of its own peaks, where the address says so", () => {
    const all = stretchOf(picked, { view: "allocator", span: "window" }, false)!;
    expect(all).toMatchObject({ from: 100, to: 120, peak: { bytes: 30, time: 101 }, name: "steps 5 to 6", whole: true });
    expect(all.query).toEqual({ run: "r", worker: "w", device: "cpu", step: 6, span: "window" });
  });

  it("stays the step in views without windows, and in a window of one step", () => {
    expect(stretchOf(picked, { view: "modules", span: "window" }, false)!.whole).toBe(false);
    const first = resolveSelection(answer, { view: "stacks", run: "r", step: "1" })!;
    expect(stretchOf(first, { view: "stacks", span: "window" }, false)!.whole).toBe(false);
  });
});
