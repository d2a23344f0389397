import { useMemo } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { ModulesAnswer, StepAnswer } from "../../api/types";
import { alone, navigate, picked, route, selection } from "../../state/app";
import { exactBytes, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { layersAsOne } from "../../state/module_icicle";
import { matcher, matches, type Order, visibleRows } from "../../state/module_rows";
import { buildFlat, buildTree, type ModuleNode } from "../../state/module_tree";
import { titleText } from "../../state/names";
import { counted } from "../../state/numbers";
import { largestModule, stepName } from "../../state/sentences";
import { CategoryKey } from "../category";
import { Notice } from "../notices";
import { RouteLink } from "../route_link";
import { RouteChoice } from "../route_choice";
import { Toggle } from "../segmented";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { aboutModules, aboutTimes, hasOnlyFigures } from "../times";
import { type At, categoriesAt, type Column, columnsOf, nextSorting, readSorting, type Sorting } from "./columns";
import { IcicleView } from "./icicle_view";
import { ModuleTable } from "./module_table";

const SHAPES = [
  ["tree", "Tree"],
  ["flat", "Flat"],
  ["icicle", "Icicle"],
] as const;
const MOMENTS = [
  ["peak", "At the peak"],
  ["highest", "Each at its highest"],
] as const;
type Shape = (typeof SHAPES)[number][0];

/** An address bears some hundred rows. */
const MOST_FLIPPED = 300;

/** The tree of modules at the step's peak. */
export function Modules() {
  const pick = picked.value!;
  const answer = useRemote<ModulesAnswer>(address("modules", pick), 0, ["step"]);
  const step = useRemote<StepAnswer>(address("step", pick));
  if (answer.failure) return <FailureState failure={answer.failure} />;
  if (!answer.data) return <Loading what="the modules" />;
  const largest = step.data && largestModule(step.data, alone.value);
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      {largest ? (
        <Headline pieces={largest} />
      ) : (
        <h1 class={step.loading ? "headline" : "unseen"}>Memory by module, {stepName(pick.step, alone.value)}</h1>
      )}
      {!step.loading && !answer.data.rows.some((row) => row.kind === "module") && (
        <NoModules step={step.data} operators={answer.data.rows.some((row) => row.kind === "outside")} />
      )}
      <Table answer={answer.data} step={pick.step} sentences={[aboutTimes(step.data), aboutModules(step.data)].filter((each) => each !== null)} />
    </div>
  );
}

function Table({ answer, step, sentences }: { answer: ModulesAnswer; step: number; sentences: string[] }) {
  const { find = "", shape: shapeText, fold: foldText, at: atText, sort } = route.value;
  const shape = SHAPES.find(([key]) => key === shapeText)?.[0] ?? "tree";
  const flat = shape === "flat";
  const fold = foldText !== "off";
  const known = answer.rows.some((row) => row.highest !== null);
  const at: At = atText === "highest" && known && shape === "tree" ? "highest" : "peak";
  const flippedText = route.value.flipped ?? "";
  const flipped = useMemo(() => new Set(flippedText.split(",")), [flippedText]);
  const start = selection.value?.stats?.step_start_ns ?? 0;
  const roots = useMemo(() => rootsOf(sinceStart(answer, start), shape, fold), [answer, start, shape, fold]);
  const columns = useMemo(() => columnsOf(roots, at), [roots, at]);
  const sorting = readSorting(sort, at);
  const filter = useMemo(() => matcher(find), [find]);
  const rows = useMemo(() => {
    if (shape === "icicle") return [];
    const order = sorting && orderBy(sorting, columns, at);
    return visibleRows(roots, (node, depth) => opened(node, depth, flat) !== flipped.has(node.id), order, filter, at === "peak");
  }, [roots, shape, flipped, sort, columns, filter]);
  const whole = unitFor(answer.peak_bytes);
  const largest = useMemo(() => roots.reduce((top, node) => Math.max(top, node.bytes), 0), [roots]);
  const unit = unitWithin(whole, largest);
  const flip = (node: ModuleNode): void => {
    const ids = flippedText.split(",").filter((id) => id !== "" && id !== node.id);
    if (!flipped.has(node.id)) ids.push(node.id);
    navigate({ flipped: ids.slice(-MOST_FLIPPED).join(",") || undefined });
  };
  return (
    <>
      <div class="tools">
        <input
          class="search"
          type="search"
          placeholder="Filter modules (blocks.*.attn)"
          aria-label="Filter modules; * stands for anything"
          data-testid="module-filter"
          value={find}
          maxLength={400}
          onInput={(e) => navigate({ find: e.currentTarget.value || undefined })}
        />
        <RouteChoice of="shape" label="Shape" testid="shape" options={SHAPES} value={shape} usual="tree" />
        <Toggle
          text="Fold layers"
          testid="fold-layers"
          on={fold}
          onFlip={() => navigate({ fold: fold ? "off" : undefined })}
        />
        {known && shape === "tree" && <RouteChoice of="at" label="Moment" testid="at" options={MOMENTS} value={at} usual="peak" />}
        <span class="hint" data-testid="modules-caption">
          {caption(unit.name, stepName(step, alone.value), at, flat)}
        </span>
      </div>
      {shape === "icicle" ? (
        <IcicleView roots={roots} filter={filter} />
      ) : (
        <ModuleTable
          rows={rows}
          at={at}
          columns={columns}
          unit={unit}
          sorting={sorting}
          onSort={(id) => navigate({ sort: nextSorting(sorting, id) })}
          onFlip={flip}
        />
      )}
      {shape !== "icicle" && <CategoryKey keys={rows.flatMap(({ node }) => Object.keys(categoriesAt(node, at)))} />}
      <p class="foot" data-testid="modules-sum" title={exactBytes(roots.reduce((s, n) => s + n.bytes, 0))}>
        {filter && at === "peak" && found(matches(roots, filter), unit)}
        {counted(answer.rows.length, "row")} · {at === "highest" ? "at the peak, " : ""}
        {flat ? "all rows" : "the outermost rows"} sum to{" "}
        {withUnit(
          roots.reduce((s, n) => s + n.bytes, 0),
          whole,
        )}
        {sentences.length > 0 && `. ${sentences.join(" ")}`}
      </p>
    </>
  );
}

/** With the times of what is highest as the page shows them. */
function sinceStart(answer: ModulesAnswer, start: number): ModulesAnswer {
  const rows = answer.rows.map((row) => ({ ...row, highest_ns: row.highest_ns === null ? null : row.highest_ns - start }));
  return { ...answer, rows };
}

function rootsOf(answer: ModulesAnswer, shape: Shape, fold: boolean): ModuleNode[] {
  if (shape === "flat") return buildFlat(answer.rows, fold);
  const tree = buildTree(answer.rows, fold);
  return shape === "icicle" && fold ? layersAsOne(tree) : tree;
}

function found({ count, bytes }: { count: number; bytes: number }, unit: Unit): string {
  return `${counted(count, "row matches", "rows match")}, ${withUnit(bytes, unit)} together · `;
}

function caption(unit: string, step: string, at: At, flat: boolean): string {
  if (at === "highest") return `${unit}, each module at its own highest moment in ${step}, with everything inside; of folded rows the highest one. Moments differ, so rows do not add up`;
  return flat
    ? `${unit} of each module alone, at the peak of ${step}`
    : `${unit} at the peak of ${step}, with everything inside`;
}

/** Open at first: the outermost modules, but not a row that stands for many layers. */
function opened(node: ModuleNode, depth: number, flat: boolean): boolean {
  return !flat && depth < 1 && node.layers === null && node.children.length <= 100;
}

function orderBy({ id, descending }: Sorting, columns: Column[], at: At): Order {
  if (id === "name") return { value: (node) => node.key, descending };
  const column = columns.find((c) => c.id === id) ?? columns[0]!;
  return { value: (node) => column.value(node, at) ?? -1, descending };
}

/** Where a recording names no module: what the rows are then, and how the next one names them. */
function NoModules({ step, operators }: { step: StepAnswer | undefined; operators: boolean }) {
  if (hasOnlyFigures(step))
    return (
      <div class="over-cards">
        <Notice level="warning" testid="only-figures">
          Only the figures of this step are here: the side file with its modules{" "}
          <span class="mono">{titleText(step!.source.side_file)} </span>
          cannot be read. Copy the run's folder plugins/tb_memplugin from the machine that recorded it, then reload.
        </Notice>
      </div>
    );
  return (
    <div class="over-cards">
      <Notice level="info" testid="no-modules">
        This recording names no modules
        {operators ? ", so its rows stand for the operators that allocated" : " and no operators, so all is in one row"}.{" "}
        <RouteLink to={{ view: "stacks" }}>Stacks</RouteLink> and{" "}
        <RouteLink to={{ view: "timeline" }}>Timeline</RouteLink> show what else it knows. To see modules:{" "}
        <span class="mono">{HOW[step?.source.kind ?? ""] ?? "memory_trace_handler(DIR, model=model, optimizer=optimizer)"}</span>
      </Notice>
    </div>
  );
}

const HOW: Record<string, string> = {
  snapshot: "memory_trace_handler(DIR, model=model, optimizer=optimizer, snapshot=True)",
  MemoryTracer: "tracer.trace(model, optimizer)",
  LineTracer: "MemoryTracer().trace(model, optimizer)",
};
