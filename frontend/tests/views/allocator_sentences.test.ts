import { describe, expect, it } from "vitest";
import type { AllocatorState, OomReport, ReserveCurve } from "../../src/api/types";
import { plain } from "../../src/state/sentences";
import { atMoment, headline } from "../../src/views/allocator/sentences";

const MiB = 2 ** 20;

function curve(peak: number, reserved: number | null): ReserveCurve {
  const mark = (bytes: number) => ({ event: 0, time_ns: 0, bytes, unused: null });
  return { peak: mark(peak), reserved_peak: reserved === null ? null : mark(reserved) } as ReserveCurve;
}

describe("the headline", () => {
  it("says how much was reserved, and used of it", () =>
    expect(plain(headline("cuda:0", curve(80 * MiB, 100 * MiB), undefined))).toBe(
      "PyTorch reserved up to 100.0 MiB on cuda:0 and used up to 80.00 MiB of it.",
    ));
  it("says so where a file contradicts itself", () =>
    expect(plain(headline("cuda:0", curve(80 * MiB, 10 * MiB), undefined))).toContain("contradicts itself"));
  it("does not speak of a reserve that is not known", () =>
    expect(plain(headline("cpu", curve(80 * MiB, null), undefined))).toBe("cpu used up to 80.00 MiB."));
  it("puts a failed request first, and why", () => {
    const report = { requested_bytes: 64 * MiB, cause: "fragmented" } as OomReport;
    expect(plain(headline("cuda:1", curve(1, 2), report))).toBe(
      "On cuda:1 a request of 64.00 MiB failed: enough was free, but not in one piece.",
    );
    expect(plain(headline("cuda:1", curve(1, 2), { ...report, cause: "unknown" }))).toBe(
      "On cuda:1 a request of 64.00 MiB failed.",
    );
  });
});

describe("the moment shown", () => {
  const state = (fields: Partial<AllocatorState>): AllocatorState =>
    ({ reserved_bytes: 100 * MiB, allocated_bytes: 75 * MiB, unused: 0.25, ...fields }) as AllocatorState;
  it("says how much of the reserve is of no use", () =>
    expect(plain(atMoment(state({ free_bytes: 20 * MiB, largest_free_bytes: 8 * MiB })))).toBe(
      "At the moment shown, 25.00 MiB of the reserve (25.0 %) is not allocated; the largest free block is 8.00 MiB.",
    ));
  it("is silent of free blocks where none are known", () =>
    expect(plain(atMoment(state({ free_bytes: null, largest_free_bytes: null })))).toMatch(/not allocated\.$/));
  it("says nothing without a reserve", () => expect(atMoment(state({ reserved_bytes: null }))).toEqual([]));
  it("says so where more is in use than reserved", () =>
    expect(plain(atMoment(state({ allocated_bytes: 120 * MiB })))).toContain("20.00 MiB more is in use"));
});
