import { useMemo } from "preact/hooks";
import type { CompareAnswer, CompareBy, Status } from "../../api/types";
import { navigate, route } from "../../state/app";
import { deltaWithUnit, exactBytes, inUnit, type Unit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { categoryLabel } from "../../state/categories";
import { foldChanges, type FoldedChange, mainCategory, openedChange, unfolded } from "../../state/change_folding";
import { toldApart } from "../../state/frames";
import { layerOf } from "../../state/folding";
import { openedGroups, withFlipped } from "../../state/module_groups";
import { shortened, titleText, visible } from "../../state/names";
import { sideName } from "../../state/sentences";
import { Delta } from "../amount";
import { Category, Swatch } from "../category";
import { divisionLabel, isOurs, partLabel } from "../divisions";
import { Fold } from "../fold";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { RouteChoice } from "../route_choice";
import { Toggle } from "../segmented";
import { reusedKey, RowsInSight, useRowsInSight } from "../windowed";
import { NumberHead, UnseenHead } from "../table";

const ROW = 31;

/** What changed, row by row; the deltas sum to the change of the peak. */
export function Changes({
  answer,
  by,
  usual,
  whats,
  unit,
  stale,
}: {
  answer: CompareAnswer;
  by: CompareBy;
  /** What the rows are where the address does not say it. */
  usual: CompareBy;
  whats: string[];
  unit: Unit;
  stale: boolean;
}) {
  const onlyChanged = route.value.changed === "1";
  const fold = by === "module" && route.value.fold !== "off";
  const open = useMemo(() => new Set(openedGroups(route.value.opened)), [route.value.opened]);
  const folded = useMemo(() => (fold ? foldChanges(answer.rows) : answer.rows.map(unfolded)), [answer, fold]);
  const rows = useMemo(() => linesOf(folded, onlyChanged, open), [folded, onlyChanged, open]);
  const flip = (key: string): void => navigate({ opened: withFlipped(route.value.opened, key) });
  const own = useMemo(() => (by === "stack" ? toldApart(answer.rows) : null), [answer, by]);
  const changed = answer.rows.filter((row) => row.status !== "same").length;
  const { box, sight } = useRowsInSight(rows.length, ROW);
  const widest = rows.reduce((top, { row }) => Math.max(top, Math.abs(row.delta_bytes)), 0);
  const withCategory = by !== "category" && answer.rows.some((row) => row.category !== null);
  const sum = answer.rows.reduce((s, row) => s + row.delta_bytes, 0);
  return (
    <section class={stale ? "card stale" : "card"} style={{ marginTop: "14px" }}>
      <div class="tools">
        <h2>What changed</h2>
        <RouteChoice
          of="what"
          label="Rows"
          testid="what"
          options={whats.map((what) => [what, divisionLabel(what)] as const)}
          value={by}
          usual={usual}
        />
        {by === "module" && (
          <Toggle
            text="Fold layers"
            testid="fold-layers"
            on={fold}
            onFlip={() => navigate({ fold: fold ? "off" : undefined })}
          />
        )}
        <Toggle
          text={`Only what changed (${grouped(changed)} of ${grouped(answer.rows.length)})`}
          testid="only-changed"
          on={onlyChanged}
          onFlip={() => navigate({ changed: onlyChanged ? undefined : "1" })}
        />
        <span class="hint" data-testid="delta-sum" title={exactBytes(sum)}>
          {unit.name} at the peak · deltas sum to {sum === 0 ? "0" : deltaWithUnit(sum, unit)}
        </span>
      </div>
      <div class="scroller" ref={box} tabIndex={0} role="region" aria-label="What changed" style={{ margin: "0 -8px" }}>
        <table class="grid" style={{ minWidth: "720px" }} aria-rowcount={rows.length + 1}>
          <colgroup>
            <col style={{ width: "24%" }} />
            <col style={{ width: "86px" }} />
            <col style={{ width: "15%" }} />
            <col style={{ width: "15%" }} />
            <col style={{ width: "10%" }} />
            <col />
            {withCategory && <col style={{ width: "138px" }} />}
          </colgroup>
          <thead>
            <tr>
              <th scope="col">{divisionLabel(by).toLowerCase()}</th>
              <th scope="col">status</th>
              <NumberHead><SideHead name={sideName(answer.base, answer.other)} /></NumberHead>
              <NumberHead><SideHead name={sideName(answer.other, answer.base)} /></NumberHead>
              <NumberHead>delta</NumberHead>
              <UnseenHead>delta as a bar</UnseenHead>
              {withCategory && (
                <th scope="col" title="The category of most of the change">
                  category
                </th>
              )}
            </tr>
          </thead>
          <RowsInSight sight={sight} columns={7}>
            {rows.slice(sight.first, sight.last).map((line, i) => (
              <ChangeRow
                key={reusedKey(sight.first + i, sight)}
                line={line}
                open={open.has(line.row.key)}
                own={own?.get(line.row.key)}
                onFlip={flip}
                by={by}
                withCategory={withCategory}
                unit={unit}
                widest={widest}
                index={sight.first + i}
              />
            ))}
          </RowsInSight>
        </table>
        {rows.length === 0 && <p class="nothing">No row differs by a byte.</p>}
      </div>
    </section>
  );
}

const TONE: Record<Status, string> = {
  added: "grown",
  grown: "grown",
  removed: "shrunk",
  shrunk: "shrunk",
  same: "same",
};

/** Both ends kept; a line ends between words or behind a separator, and never within a word. */
function SideHead({ name }: { name: string }) {
  return (
    <span class="side-head" title={titleText(name)}>
      {shortened(visible(name), 44)
        .split(/(?<=[/_.-])/)
        .flatMap((piece, i) => (i === 0 ? [piece] : [<wbr key={i} />, piece]))}
    </span>
  );
}

function linesOf(folded: FoldedChange[], onlyChanged: boolean, open: ReadonlySet<string>): Line[] {
  const kept = onlyChanged
    ? folded.filter((row) => row.status !== "same" || row.members.some((m) => m.status !== "same"))
    : folded;
  const withInner = (line: Line): Line[] => {
    const { row, depth } = line;
    const inner = row.members.length > 0 && open.has(row.key) ? openedChange(row) : [];
    return [line, ...inner.flatMap((layer) => withInner({ row: layer, depth: depth + 1, within: row.key }))];
  };
  return kept.flatMap((row) => withInner({ row, depth: 0 }));
}

interface Line {
  row: FoldedChange;
  /** Of a layer, how many opened rows it stands in, and the innermost of these. */
  depth: number;
  within?: string;
}

const INDENT = 18;

interface RowProps {
  line: Line;
  open: boolean;
  /** What tells a stack apart from others that go by the same line. */
  own: string | undefined;
  onFlip: (key: string) => void;
  by: CompareBy;
  withCategory: boolean;
  unit: Unit;
  widest: number;
  index: number;
}

function ChangeRow({ line, open, own, onFlip, by, withCategory, unit, widest, index }: RowProps) {
  const { row, depth, within } = line;
  const module =
    within === undefined ? <Name text={row.key} module /> : <Name text={layerOf(row.key, within)} title={row.key} />;
  const inner = (left: number): { paddingLeft: string } | undefined =>
    depth > 0 ? { paddingLeft: `${left + depth * INDENT}px` } : undefined;
  const share = widest > 0 ? (50 * Math.abs(row.delta_bytes)) / widest : 0;
  const category = mainCategory(row);
  return (
    <tr aria-rowindex={index + 2} data-testid="compare-row" data-key={row.key} data-status={row.status}>
      <th scope="row">
        {isOurs(by) ? (
          <>
            <Swatch by={by} of={row.key} />
            {categoryLabel(row.key)}
          </>
        ) : row.members.length > 0 ? (
          <Fold open={open} style={inner(0)} onFlip={() => onFlip(row.key)}>
            {module}
            <span class="times">×{grouped(row.members.length)}</span>
          </Fold>
        ) : (
          <span class="leaf" style={inner(16)}>
            {by === "module" && !row.key.startsWith("(") ? (
              <RouteLink to={{ view: "modules", find: row.key || undefined }} class="plain-link">
                {module}
              </RouteLink>
            ) : (
              <Name text={partLabel(by, row.label, own)} title={by === "stack" ? row.key : undefined} />
            )}
          </span>
        )}
      </th>
      <td>
        <span class={`pill ${TONE[row.status] ?? "same"}`}>{row.status}</span>
      </td>
      <td
        class={row.base_bytes === 0 ? "number zero" : "number"}
        title={`${exactBytes(row.base_bytes)} in ${grouped(row.base_count)}`}
      >
        {row.base_bytes === 0 ? "0.00" : inUnit(row.base_bytes, unit)}
      </td>
      <td
        class={row.other_bytes === 0 ? "number zero" : "number"}
        title={`${exactBytes(row.other_bytes)} in ${grouped(row.other_count)}`}
      >
        {row.other_bytes === 0 ? "0.00" : inUnit(row.other_bytes, unit)}
      </td>
      <td class="number strong">
        <Delta bytes={row.delta_bytes} unit={unit} />
      </td>
      <td>
        <span class="diverging" aria-hidden="true">
          {row.delta_bytes !== 0 && <i class={row.delta_bytes > 0 ? "plus" : "minus"} style={{ width: `${share}%` }} />}
        </span>
      </td>
      {withCategory && (
        <td>
          {category !== null && (
            <Category of={category} />
          )}
          {category === null && row.delta_bytes !== 0 && row.category !== null && <span class="muted">several</span>}
        </td>
      )}
    </tr>
  );
}
