import { useEffect, useMemo, useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import { type ColorBy, type Home, PENDING, type SegmentsAnswer } from "../../api/types";
import { isUnknown, LINE } from "../../draw/paint_tape";
import { layTape, segmentsBetween, type Tape } from "../../draw/tape";
import { sharpness } from "../../draw/surface";
import { navigate, route } from "../../state/app";
import { inUnit, type Unit, unitFor, withUnit } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { cellText, moduleLabel, titleText } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import type { Pick } from "../../state/selection";
import { Swatch } from "../category";
import { RouteChoice } from "../route_choice";
import { FailureState } from "../states";
import { BlockPanel } from "./block_panel";
import { SAME_WINDOW, type ShownMoment } from "./moment";
import { shortLine } from "./state_panel";
import { type Place, TapeView } from "./tape_view";

const BYS = [
  ["category", "Category"],
  ["module", "Module"],
  ["line", "Source line"],
  ["pool", "Pool"],
  ["stream", "Stream"],
] as const;
const ORDERS = [
  ["pool", "Pool, stream"],
  ["size", "Size"],
  ["free", "Free bytes"],
  ["address", "Address"],
] as const;

const FIT_LINES = 12;
const MOST_LINES = 18;
const FINEST = 16;
/** Up to this scale the pieces of all segments come at once; beyond, those around what is in sight. */
const WHOLE_UP_TO = 2;

interface Props {
  pick: Pick;
  moment: ShownMoment;
  /** The highest reserve of the step: the scale does not change from moment to moment. */
  highest: number;
  origin: number;
}

/** All segments as bars, as wide as they have bytes, with what lies in them. */
export function Segments({ pick, moment, highest, origin }: Props) {
  const [width, setWidth] = useState(0);
  const [top, setTop] = useState(0);
  const [hovered, setHovered] = useState<Place | null>(null);
  const by = known(BYS, route.value.colour);
  const order = known(ORDERS, route.value.order);
  const level = Math.max(0, Math.round(Number(route.value.scale ?? 0)) || 0);
  const scale = Math.max(FINEST, highest / (FIT_LINES * Math.max(1, width)) / 2 ** level);
  const finest = Math.max(1, Math.ceil(scale / sharpness()));

  const of = JSON.stringify([pick, order, level, width]);
  const [range, setRange] = useState<{ of: string; first: number; last: number } | undefined>(undefined);
  const kept = range?.of === of ? range : undefined;
  const wanted = level <= WHOLE_UP_TO ? {} : { first: kept?.first ?? 0, last: kept?.last ?? 0 };
  const path =
    width > 0 && moment.query
      ? address("allocator_segments", { ...pick, ...moment.query, by, order, finest, ...wanted })
      : null;
  const remote = useRemote<SegmentsAnswer>(path, 0, SAME_WINDOW);
  const answer = remote.data;
  const tape = useMemo(() => answer && laidOut(answer, scale, width), [answer?.segments, answer?.order, scale, width]);
  const height = Math.min(tape ? tape.lines : FIT_LINES, MOST_LINES) * LINE + 6;
  useEffect(() => {
    if (!tape || level <= WHOLE_UP_TO) return;
    const [from, to] = [Math.floor(top / LINE), Math.ceil((top + height) / LINE)];
    const seen = segmentsBetween(tape, from, to);
    if (!seen || (kept && kept.first <= seen[0] && kept.last >= seen[1])) return;
    const around = segmentsBetween(tape, from - MOST_LINES, to + MOST_LINES) ?? seen;
    setRange({ of, first: around[0], last: around[1] });
  }, [tape, top, height, of]);

  const selected = route.value.block === undefined ? null : Number(route.value.block);
  const zoom = (by: number): void => navigate({ scale: level + by > 0 ? String(level + by) : undefined });
  const unit = unitFor(highest);
  return (
    <section class="card segments" data-testid="segments" aria-busy={remote.loading}>
      <div class="tools">
        <h2>{answer ? summary(answer, unit) : "Segments"}</h2>
        <span class="grow" />
        <span class="buttons">
          <button type="button" class="small" data-testid="tape-out" disabled={level === 0} onClick={() => zoom(-1)}>
            − smaller
          </button>
          <button type="button" class="small" data-testid="tape-in" disabled={scale <= FINEST} onClick={() => zoom(1)}>
            + larger
          </button>
        </span>
      </div>
      <div class="tools">
        <RouteChoice of="colour" label="Color by" testid="color" options={BYS} value={by} />
        <RouteChoice of="order" label="Order" testid="order" options={ORDERS} value={order} />
        <span class="hint">point at a block · click to keep it · ← → to the next</span>
      </div>
      {remote.failure && <FailureState failure={remote.failure} />}
      <div class="beside tape-and-block">
        <div>
          <TapeView
            answer={answer}
            tape={tape}
            by={answer?.by ?? by}
            height={height}
            selected={selected}
            heading={(home) => headingOf(home, unit)}
            onWidth={setWidth}
            onScroll={setTop}
            onHover={setHovered}
            onPick={(row) => navigate({ block: row === null ? undefined : String(row) })}
          />
          {answer && <Legend answer={answer} unit={unit} />}
        </div>
        <BlockPanel pick={pick} moment={moment} answer={answer} hovered={hovered} selected={selected} origin={origin} />
      </div>
    </section>
  );
}

function known<T extends string>(options: readonly (readonly [T, string])[], value: string | undefined): T {
  return options.find(([option]) => option === value)?.[0] ?? options[0]![0];
}

function laidOut(answer: SegmentsAnswer, scale: number, width: number): Tape | undefined {
  const { bytes, home } = answer.segments;
  return width > 0 ? layTape(bytes, answer.order === "pool" ? home : null, scale, width) : undefined;
}

function summary(answer: SegmentsAnswer, unit: Unit): string {
  const { bytes, free } = answer.segments;
  const whole = bytes.reduce((sum, size) => sum + size, 0);
  const empty = bytes.filter((size, i) => size === free[i]).length;
  const all = `${counted(bytes.length, "segment")}, ${withUnit(whole, unit)}`;
  return empty === 0 ? all : `${all}, ${grouped(empty)} of them empty`;
}

function headingOf(home: Home, unit: Unit): string {
  const count = counted(home.segments, "segment");
  return `${cellText(home.pool)} pool · ${cellText(home.stream)} · ${withUnit(home.bytes, unit)} in ${count}`;
}

/** The colors, with the bytes of each in all segments; what is free and pending by its look. */
function Legend({ answer, unit }: { answer: SegmentsAnswer; unit: Unit }) {
  const free = answer.segments.free.reduce((sum, bytes) => sum + bytes, 0);
  const by = answer.by === "category" ? "category" : "module";
  return (
    <ul class="legend" data-testid="tape-legend">
      <li class="muted">{unit.name}</li>
      {answer.keys.map((part, index) => (
        <li
          key={part.key}
          data-key={part.key}
          title={`${titleText(labelOf(answer.by, part.label))}: ${grouped(part.bytes)} bytes in ${grouped(part.count)}`}
        >
          {isUnknown(answer.by, part.key) ? (
            <span class="swatch dense" aria-hidden="true" />
          ) : (
            <Swatch by={by} of={part.key} index={index} />
          )}
          <span class={answer.by === "category" ? undefined : "mono"}>{shown(answer.by, part.label)}</span>{" "}
          <span class="muted">{inUnit(part.bytes, unit)}</span>
        </li>
      ))}
      <li title={`${grouped(free)} bytes`}>
        <span class="swatch level-free" aria-hidden="true" />
        free <span class="muted">{inUnit(free, unit)}</span>
      </li>
      {answer.pieces.state.includes(PENDING) && (
        <li>
          <span class="swatch stripes" aria-hidden="true" />
          striped: pending
        </li>
      )}
    </ul>
  );
}

function labelOf(by: ColorBy, label: string): string {
  return by === "category" ? categoryLabel(label) : by === "module" ? moduleLabel(label) : label;
}

function shown(by: ColorBy, label: string): string {
  return by === "line" ? shortLine(label) : cellText(labelOf(by, label));
}
