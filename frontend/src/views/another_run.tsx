import { picked, runs } from "../state/app";
import { shortened, titleText, visible } from "../state/names";
import { runName } from "../state/run_name";
import { runBefore } from "../state/selection";
import { RouteLink } from "./route_link";

/** One click from a step to what changed since another run; nothing where there is no other. */
export function AnotherRun({ lead = "" }: { lead?: string }) {
  const run = runs.value && picked.value ? runBefore(runs.value, picked.value) : null;
  if (run === null) return null;
  return (
    <>
      {lead}
      <RouteLink
        to={{ view: "compare", base_run: run, base_worker: undefined, base_step: undefined }}
        title={titleText(run)}
        testid="another-run"
      >
        Compare with run {shortened(visible(runName(run)), 40)}
      </RouteLink>
    </>
  );
}
