import { address } from "../api/request";
import { useRemote } from "../api/remote";
import type { FleetAnswer } from "../api/types";
import { picked, selection } from "../state/app";
import { otherRanks, rankOf, rankToOpen } from "../state/fleet";
import { cellText } from "../state/names";
import { RouteLink } from "./route_link";
import { Sentence } from "./sentence";

/** Of a run of several ranks: which peaks highest or grows, and the way to it. */
export function OtherRanks() {
  const { workers, devices } = selection.value!;
  const { run, worker, device } = picked.value!;
  const several = workers.length > 1 || devices.length > 1;
  const row = useRemote<FleetAnswer>(several ? address("fleet", { run }) : null).data?.runs[0];
  const noun = workers.length > 1 ? "rank" : "device";
  const pieces = row ? otherRanks(row, { worker, device }, noun) : [];
  if (!row || pieces.length === 0) return null;
  const place = rankToOpen(row, { worker, device });
  return (
    <p class="lead" data-testid="other-ranks">
      <Sentence pieces={pieces} />{" "}
      {place && (
        <>
          <RouteLink to={place} testid="open-rank">
            Open {cellText(rankOf(place, row, noun))}
          </RouteLink>
          {" · "}
        </>
      )}
      <RouteLink to={{ view: "ranks" }} testid="all-ranks">
        All ranks
      </RouteLink>
    </p>
  );
}
