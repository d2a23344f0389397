import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CompareAnswer, Rank } from "../../api/types";
import { isAlone } from "../../state/app";
import { exactBytes, type Unit, withUnit } from "../../state/bytes";
import { shortened, visible } from "../../state/names";
import type { RoutePatch } from "../../state/route";
import { highestRank, rankName } from "../../state/ranks";
import { changeSince } from "../../state/sentences";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Sentence } from "../sentence";

/** What the highest rank has and the median one has not, at the same step. */
export function Why({ rows, run, unit }: { rows: Rank[]; run: string; unit: Unit }) {
  const top = highestRank(rows);
  const { median } = top;
  const comparable = canCompare(top);
  const sides = comparable && {
    run,
    worker: top.worker,
    device: top.device,
    step: top.highest_step,
    base_run: run,
    base_worker: median!.worker,
    base_device: median!.device,
    base_step: top.highest_step,
  };
  const change = useRemote<CompareAnswer>(sides ? address("compare", { by: "module", ...sides }) : null);
  if (!median || top.highest_bytes === median.bytes) return null;
  return (
    <p class="lead" data-testid="ranks-why">
      {!comparable ? (
        <>
          The median at step {top.highest_step} is <Name text={rankName(median, rows)} chip />, with{" "}
          <strong class="amount" title={exactBytes(median.bytes)}>
            {withUnit(median.bytes, unit)}
          </strong>
          . What makes the difference is not known: the step was not recorded in full on both.
        </>
      ) : change.data ? (
        <Sentence pieces={changeSince({ ...change.data, base: { ...change.data.base, alone: isAlone(change.data.base) } }, unit)} />
      ) : (
        (change.failure?.what ?? "Comparing …")
      )}{" "}
      {comparable && (
        <RouteLink to={comparing(top, run)} testid="ranks-compare">
          Compare {short(rankName(top, rows))} with {short(rankName(median, rows))}
        </RouteLink>
      )}
    </p>
  );
}

/** The device, which is last, stays. */
function short(name: string): string {
  return shortened(visible(name), 40);
}

/** Whether both steps were recorded in full, and are not one and the same. */
export function canCompare({ worker, device, recorded, median }: Rank): boolean {
  return recorded && median !== null && median.recorded && !(median.worker === worker && median.device === device);
}

/** The way to Compare: a rank at its highest, against the median rank at the same step. */
export function comparing({ worker, device, highest_step, median }: Rank, run: string): RoutePatch {
  return {
    view: "compare",
    worker,
    device,
    step: String(highest_step),
    base_run: run,
    base_worker: median!.worker,
    base_device: median!.device === device ? undefined : median!.device,
    base_step: String(highest_step),
  };
}
