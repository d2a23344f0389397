import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CompareAnswer, CompareBy } from "../../api/types";
import { alone, base, isAlone, navigate, picked, route, runs } from "../../state/app";
import { type Unit, unitFor } from "../../state/bytes";
import type { Pick } from "../../state/selection";
import { comparison, comparisonDetail, namesModules, reasons, unitOfChange } from "../../state/sentences";
import { AnotherRun } from "../another_run";
import { divisionLabel, partLabel, useDivisions } from "../divisions";
import { RouteChoice } from "../route_choice";
import { Headline, Sentence } from "../sentence";
import { FailureState, Loading } from "../states";
import { Curves } from "./curves";
import { Changes } from "./changes";

const CURVES = [
  ["beside", "Side by side"],
  ["over", "Overlaid"],
] as const;

/** Two steps: which peaks higher, by how much, and what makes the difference. */
export function Compare() {
  const pick = picked.value as Pick;
  const basis = base.value;
  if (!basis) return <NothingToCompare />;
  return <Comparison pick={pick} basis={basis} />;
}

function Comparison({ pick, basis }: { pick: Pick; basis: Pick }) {
  const whats = whatsOf(useDivisions(pick, ALWAYS, route.value.what));
  const sides = {
    ...pick,
    base_run: basis.run,
    base_worker: basis.worker,
    base_step: basis.step,
    base_device: basis.device,
  };
  const byModule = useRemote<CompareAnswer>(address("compare", { by: "module", ...sides }));
  const rows = byModule.data?.rows;
  const usual = rows && !(namesModules(rows, "base_bytes") && namesModules(rows, "other_bytes")) ? "category" : "module";
  const by: CompareBy = whats.find((what) => what === route.value.what) ?? usual;
  const byUsual = useRemote<CompareAnswer>(rows ? address("compare", { by: usual, ...sides }) : null);
  const table = useRemote<CompareAnswer>(address("compare", { by, ...sides }), 0, ["by"]);
  if (table.failure) return <FailureState failure={table.failure} />;
  const summary = byUsual.data ?? byModule.data ?? table.data;
  if (!summary || !table.data) return <Loading what="both steps" />;
  const answer = withNames(summary);
  const unit = unitFor(answer.base.peak_bytes, answer.other.peak_bytes);
  const over = route.value.curves === "over";
  return (
    <>
      <Headline pieces={comparison(answer, unit)} />
      <p class="lead" data-testid="compare-detail">
        <Sentence pieces={comparisonDetail(answer, unit)} />
      </p>
      {answer.delta_bytes !== 0 &&
        ["category", "line"].map(
          (by) => by !== usual && whats.includes(by) && <Reasons key={by} by={by as CompareBy} sides={sides} unit={unit} />,
        )}
      <div class="tools">
        <RouteChoice of="curves" label="Curves" testid="curves" options={CURVES} value={over ? "over" : "beside"} usual="beside" />
        <button type="button" class="toggle" data-testid="swap" onClick={() => swap(pick, basis)}>
          Swap sides
        </button>
        {basis.run === pick.run && (
          <span class="hint">
            <AnotherRun />
          </span>
        )}
      </div>
      <Curves pick={pick} basis={basis} answer={answer} unit={unit} over={over} />
      <Changes answer={withNames(table.data)} by={by} usual={usual} whats={whats} unit={unit} stale={table.stale} />
    </>
  );
}

/** The same change by another division: what of it is gone, smaller, new or larger. */
function Reasons({ by, sides, unit }: { by: CompareBy; sides: Record<string, string | number>; unit: Unit }) {
  const { data, loading } = useRemote<CompareAnswer>(address("compare", { by, ...sides }));
  return (
    <p class="lead" data-testid={`reasons-${by}`} aria-busy={loading}>
      By {divisionLabel(by).toLowerCase()}:{" "}
      {data && <Sentence pieces={reasons(data.rows, unitOfChange(data, unit), (row) => partLabel(by, row.label))} />}
    </p>
  );
}

function swap(pick: Pick, { run, worker, device, step }: Pick): void {
  const [base_run, base_worker, base_step] = [pick.run, pick.worker, String(pick.step)];
  const base_device = pick.device === device ? undefined : pick.device;
  navigate({ run, worker, device, step: String(step), base_run, base_worker, base_device, base_step });
}

/** Every summary keeps these; the others come where this step's window knows something of them. */
const ALWAYS = ["module", "category", "operator", "phase"];

function withNames(answer: CompareAnswer): CompareAnswer {
  const { base, other } = answer;
  return { ...answer, base: { ...base, alone: isAlone(base) }, other: { ...other, alone: isAlone(other) } };
}

function whatsOf(divisions: string[]): string[] {
  return [...ALWAYS, ...divisions.filter((by) => !ALWAYS.includes(by))];
}

function NothingToCompare() {
  const others = runs.value!.runs.flatMap((run) => run.workers).filter((worker) => worker.steps.length > 0).length > 1;
  return (
    <section class="state" data-testid="nothing-to-compare">
      <h1>
        {others ? "Pick what to compare " : "There is nothing to compare "}
        {alone.value ? "this recording" : "this step"} with.
      </h1>
      <p>
        {others
          ? "No other recording here is known to be of the same model on the same kind of device. Pick any of them under “Compare with”, above."
          : "It is the only one in this log directory. Record a second one beside it, and pick it under “Compare with”."}
      </p>
    </section>
  );
}
