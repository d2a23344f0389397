import { describe, expect, it } from "vitest";
import { aboutTimes } from "../../src/views/times";

const step = (kind: string, ...codes: string[]) => ({ source: { kind }, notes: codes.map((code) => ({ code })) });

describe("what is said of times", () => {
  it("is nothing where they are times", () => expect(aboutTimes(step("torch.profiler", "iteration"))).toBeNull());
  it("is that an estimate's are no GPU's", () => expect(aboutTimes(step("MemoryEstimator"))).toContain("not a GPU's"));
  it("is that an old snapshot counts entries", () =>
    expect(aboutTimes(step("snapshot", "other", "no_times"))).toContain("one entry"));
});
