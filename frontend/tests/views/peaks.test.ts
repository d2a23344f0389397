import { describe, expect, it } from "vitest";
import type { StepChoice } from "../../src/state/selection";
import { withLater } from "../../src/views/steps/peaks";

const watched = {
  count: 3, first: [1, 3], last: [2, 3], low: [10, 30], high: [20, 30], high_step: [2, 3], reserved: [40, 50], retries: [], ooms: [],
};
const recorded = (step: number, peak: number) =>
  ({ step, window: 0, stats: { peak_bytes: peak, peak_reserved_bytes: 2 * peak } }) as StepChoice;

describe("the peaks of all steps", () => {
  it("have a recorded step that did not end, after those that were watched", () =>
    expect(withLater(watched, [recorded(2, 20), recorded(4, 45)])).toEqual({
      ...watched, count: 4, first: [1, 3, 4], last: [2, 3, 4], low: [10, 30, 45], high: [20, 30, 45], high_step: [2, 3, 4], reserved: [40, 50, 90],
    }));
  it("are those that were watched where every recorded step is among them", () => expect(withLater(watched, [recorded(3, 30)])).toEqual(watched));
});
