import type { LabeledPart } from "../../api/types";
import { navigate, route } from "../../state/app";
import { percent, type Unit } from "../../state/bytes";
import { CATEGORIES, categoryLabel } from "../../state/categories";
import { withOpened } from "../../state/module_groups";
import { toldApart } from "../../state/frames";
import { shortened, titleText, visible } from "../../state/names";
import { grouped } from "../../state/numbers";
import { BytesCell, Delta } from "../amount";
import { Swatch } from "../category";
import { divisionLabel, isOurs, partLabel } from "../divisions";
import { Fold } from "../fold";
import { Name } from "../name";
import { useChange } from "./change";
import type { Cursor } from "./cursor";
import { useGroupFocus, wantFocus } from "./group_focus";
import { Heads } from "../table";

const MOST = 14;
const OTHERS = ["(other modules)", "(others)"];

interface Props {
  by: string;
  parts: LabeledPart[];
  /** Whether the parts are the server's, not yet the curve's column. */
  exact: boolean;
  unit: Unit;
  cursor: Cursor;
  /** Of a whole window: no other step stands against it. */
  alone: boolean;
}

/** One row per part, in the curve's order from the top; beside it the change against the base or the peak. */
export function Breakdown({ by, parts, exact, unit, cursor, alone }: Props) {
  const folded = cursor.groups.size > 0;
  const steady = folded || by === "category" || by === "phase"; // few rows, each always in its place
  const change = useChange(by, exact || steady ? parts : null, cursor, alone);
  const body = useGroupFocus(exact);
  const all = parts.reduce((s, p) => s + p.bytes, 0);
  const order = cursor.approximate.map((p) => p.key);
  const gone = steady ? (change?.gone(parts) ?? []) : [];
  const sorted = [...parts.filter((p) => p.bytes > 0), ...gone].sort(
    folded
      ? (a, b) => order.indexOf(a.key) - order.indexOf(b.key)
      : steady
        ? (a, b) => rank(b.key) - rank(a.key)
        : (a, b) => b.bytes - a.bytes,
  );
  const shown = sorted.filter((p, i) => (isOurs(by) ? i < MOST : order.includes(p.key) && !OTHERS.includes(p.key)));
  const rest = sorted.filter((p) => !shown.includes(p));
  const others = !isOurs(by) && rest.length > 0;
  const own = by === "stack" ? toldApart(shown) : null;
  const many = by === "module" ? "modules" : "parts";
  const restBytes = rest.reduce((s, p) => s + p.bytes, 0);
  const restDelta = change?.rest(shown) ?? 0;
  return (
    <table class={change ? "plain compared" : "plain"}>
      <Heads columns={[
          divisionLabel(by).toLowerCase(),
          { number: unit.name },
          change
            ? { look: "number", text: `vs ${shortened(visible(change.short), 12)}`, title: `vs ${change.against}` }
            : { look: "number", text: "share", title: "share of what is alive" },
        ]} />
      <tbody ref={body}>
        {shown.map((part) => (
          <tr
            key={part.key}
            class={part.bytes === 0 ? "gone" : undefined}
            data-testid={part.bytes === 0 ? "moment-gone" : "moment-row"}
            data-key={part.key}
          >
            <th scope="row" tabIndex={-1}>
              <span class="flexed">
                <Swatch by={by} of={part.key} index={Math.max(0, order.indexOf(part.key))} />
                {cursor.groups.has(part.key) ? (
                  <Group part={part} {...cursor.groups.get(part.key)!} />
                ) : isOurs(by) ? (
                  <span class="ending">{categoryLabel(part.key)}</span>
                ) : (
                  <Name text={partLabel(by, part.label, own?.get(part.key))} title={by === "stack" ? part.key : undefined} />
                )}
              </span>
            </th>
            <BytesCell bytes={part.bytes} unit={unit} />
            <td class="number">
              {change ? <Change bytes={change.of(part.key)} unit={unit} /> : <span class="muted">{percent(part.bytes, all)}</span>}
            </td>
          </tr>
        ))}
        {(rest.length > 0 || restDelta !== 0) && (
          <tr data-testid="moment-rest">
            <th scope="row" class="muted">
              {others && <Swatch by={by} of={OTHERS[0]!} />}
              {rest.length === 0
                ? "no longer alive"
                : rest.some((p) => OTHERS.includes(p.key))
                  ? `other ${many}`
                  : others
                    ? `${grouped(rest.length)} other ${many}`
                    : `${grouped(rest.length)} more`}
            </th>
            <BytesCell bytes={restBytes} unit={unit} tone="muted" />
            <td class="number muted">
              {change ? <Change bytes={restDelta} unit={unit} /> : percent(restBytes, all)}
            </td>
          </tr>
        )}
      </tbody>
    </table>
  );
}

/** Nothing where it is not known yet, or never will be. */
function Change({ bytes, unit }: { bytes: number | undefined; unit: Unit }) {
  return bytes === undefined ? null : <Delta bytes={bytes} unit={unit} />;
}

/** A group of modules: a click opens it into what is inside, or into its layers. */
function Group({ part, modules, opens }: { part: LabeledPart; modules: number; opens: boolean }) {
  const name = <Name text={partLabel("module", part.label)} module />;
  if (!opens) return name;
  const open = (): void => {
    wantFocus({ opened: part.key });
    navigate({ opened: withOpened(route.value.opened, part.key) });
  };
  return (
    <Fold
      open={false}
      testid="open-group"
      title={`${titleText(part.key)}: ${grouped(modules)} modules. Click to see them apart.`}
      onFlip={open}
    >
      {name}
    </Fold>
  );
}

/** Categories and phases as they are stacked, from the bottom. */
const STACKED: readonly string[] = [...CATEGORIES, "before", "other", "forward", "backward", "optimizer"];

function rank(key: string): number {
  const at = STACKED.indexOf(key);
  return at < 0 ? STACKED.length : at;
}
