import { describe, expect, it } from "vitest";
import { failedInWords } from "../../src/state/failures";

const GiB = 2 ** 30;

describe("failed requests in words", () => {
  it("tells each of a few", () =>
    expect(failedInWords([{ bytes: 8 * GiB, at: "event 4" }])).toBe(" A request of 8.00 GiB failed at event 4."));
  it("tells the first three of many, and counts the others", () => {
    const many = Array.from({ length: 2000 }, (_, event) => ({ bytes: GiB, at: `event ${event}` }));
    expect(failedInWords(many)).toMatch(/failed at event 2\. 1,997 more requests failed\.$/);
  });
  it("is silent where none failed", () => expect(failedInWords([])).toBe(""));
});
