/** The sentences that open the view: what failed or how much was reserved, and how it stands at the moment shown. */
import type { AllocatorState, OomReport, ReserveCurve } from "../../api/types";
import { asPartOf, percent, withUnit } from "../../state/bytes";
import type { Piece } from "../../state/sentences";

export const CAUSES: Record<string, string> = {
  full: "memory was full",
  fragmented: "enough was free, but not in one piece",
  elsewhere: "free memory was in other pools, streams or size classes",
  limit: "a limit on this process refused memory the device had",
  "not split": "a free block was large enough, but may not be used",
};

/** Why a request failed, else how much was reserved, and used of it. */
export function headline(device: string, curve: ReserveCurve, report: OomReport | undefined): Piece[] {
  if (report) {
    const asked = { strong: withUnit(report.requested_bytes), exact: report.requested_bytes };
    const why = CAUSES[report.cause];
    return ["On ", { name: device }, " a request of ", asked, why ? ` failed: ${why}.` : " failed."];
  }
  const peak = { strong: withUnit(curve.peak.bytes), exact: curve.peak.bytes };
  const reserved = curve.reserved_peak;
  if (!reserved) return [{ name: device }, " used up to ", peak, "."];
  const most = { strong: withUnit(reserved.bytes), exact: reserved.bytes };
  const start: Piece[] = ["PyTorch reserved up to ", most, " on ", { name: device }, " and used up to ", peak];
  return [
    ...start,
    curve.peak.bytes > reserved.bytes ? ": more than it reserved, so the file contradicts itself." : " of it.",
  ];
}

/** What of the reserve is of no use at the moment. */
export function atMoment(state: AllocatorState): Piece[] {
  const { reserved_bytes: reserved, allocated_bytes: allocated, largest_free_bytes: largest } = state;
  if (reserved === null || state.unused === null) return [];
  const unused = reserved - allocated;
  if (unused < 0)
    return [
      "At the moment shown, ",
      { strong: withUnit(-unused), exact: -unused },
      " more is in use than is reserved: some segments were not recorded.",
    ];
  const pieces: Piece[] = [
    "At the moment shown, ",
    { strong: asPartOf(reserved, unused), exact: unused },
    ` of the reserve (${percent(state.unused, 1)}) is not allocated`,
  ];
  if (largest === null || state.free_bytes === null || state.free_bytes === 0) return [...pieces, "."];
  return [...pieces, "; the largest free block is ", { strong: asPartOf(reserved, largest), exact: largest }, "."];
}
