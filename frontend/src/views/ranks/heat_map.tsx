import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { RanksAnswer } from "../../api/types";
import { cellAt, cellPixels, columnLeft, type HeatLayout, layHeatMap, ramp } from "../../draw/heat_map";
import { readPalette } from "../../draw/palette";
import { prepare } from "../../draw/surface";
import { dark } from "../../host/theme";
import { deltaWithUnit, exactBytes, percent, unitFor, withUnit } from "../../state/bytes";
import { cellText, visible } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import { type Cell, type CellFigures, cellOf, colorRange, figuresOf, highestRank, nounOf, oneStep, rankName, shortNames } from "../../state/ranks";
import { usePaint, useSurface } from "../canvas";
import { Tip } from "../tip";
import { drawCell, drawHeatMap, type Picture } from "./paint";

interface Props {
  answer: RanksAnswer;
  /** Whether colors are shares of each device's memory instead of bytes. */
  shares: boolean;
  /** The picked cell. */
  kept: Cell | null;
  onPick: (cell: Cell) => void;
  onZoom: (first: number, last: number) => void;
}

const TOP = 8;
const AXIS = 24;
const ROOM = 460;
const HIGHEST = 560;
const LEAST_DRAG = 6;
/** Of names: characters, pixels of one, and room around them. */
const LONGEST = 40;
const LETTER = 7;
const BESIDE = 16;
const STOPS = ["--ramp-0", "--ramp-1", "--ramp-2", "--ramp-3", "--ramp-4"] as const;

/** A row a rank, a column a step, the color its peak. Only what is in sight is drawn. */
export function HeatMap({ answer, shares, kept, onPick, onZoom }: Props) {
  const { box, canvas, width } = useSurface();
  const pressed = useRef<number | null>(null);
  const [scrolled, setScrolled] = useState(0);
  const [at, setAt] = useState<Cell | null>(null);
  const [dragged, setDragged] = useState<[number, number] | null>(null);
  const theme = dark.value;
  const { rows, first } = answer;
  const letters = Math.floor((Math.max(48, width * 0.26) - BESIDE) / LETTER);
  const names = useMemo(() => shortNames(rows, Math.min(letters, LONGEST)), [rows, letters]);
  const left = BESIDE + LETTER * names.reduce((most, name) => Math.max(most, name.length), 4);
  const layout = layHeatMap(rows.length, first.length, width - 6, left, TOP, ROOM);
  const shown = Math.min(layout.height, HIGHEST);
  const cells = useMemo(() => cellCanvas(answer, shares), [answer, shares, theme]);
  const top = useMemo(() => {
    const rank = highestRank(rows);
    return cellOf(answer, { ...rank, step: rank.highest_step });
  }, [answer]);

  useEffect(() => setAt(null), [answer]);
  const paint = (to: HTMLCanvasElement): void => {
    const context = first.length > 0 && prepare(to, { width, height: TOP + shown + AXIS });
    if (!context) return;
    const colors = readPalette(to, context);
    const missing = colors.fill("category", "unknown", 0);
    const picture: Picture = { layout, cells, names, first, last: answer.last, alone: oneStep(rows), scrolled, shown, colors, missing };
    drawHeatMap(context, picture);
    if (kept) drawCell(context, picture, kept, colors.text, 3);
    if (top) drawCell(context, picture, top, colors.peak, 0);
    if (at) drawCell(context, picture, at, colors.accent, 0);
  };
  usePaint(canvas, paint, [answer, cells, width, scrolled, kept?.row, kept?.column, at?.row, at?.column]);

  const under = (event: PointerEvent): Cell | null => cellAt(layout, event.offsetX, event.offsetY + scrolled);
  const columnAt = (x: number): number => cellAt(layout, clamp(x, layout.left, layout.left + layout.width - 1), TOP)!.column;
  const move = (event: PointerEvent): void => {
    setAt(under(event));
    const from = pressed.current;
    if (from !== null) setDragged(Math.abs(event.offsetX - from) < LEAST_DRAG ? null : [from, event.offsetX]);
  };
  const release = (event: PointerEvent): void => {
    const [from, cell] = [pressed.current, under(event)];
    pressed.current = null;
    setDragged(null);
    if (from === null) return;
    if (Math.abs(event.offsetX - from) < LEAST_DRAG) return void (cell && onPick(cell));
    const [low, high] = [columnAt(Math.min(from, event.offsetX)), columnAt(Math.max(from, event.offsetX))];
    onZoom(first[low]!, answer.last[high]!);
  };
  const go = (row: number, column: number): void => {
    const cell = { row: clamp(row, 0, rows.length - 1), column: clamp(column, 0, first.length - 1) };
    const y = cell.row * layout.rowHeight;
    if (y < scrolled || y + layout.rowHeight > scrolled + shown) box.current!.scrollTop = y - shown / 2;
    setAt(cell);
  };
  const keys = (event: KeyboardEvent): void => {
    const { row, column } = at ?? kept ?? top ?? { row: 0, column: 0 };
    const still = at === null && event.key.startsWith("Arrow"); // the first arrow shows where one is
    if (still) go(row, column);
    else if (event.key === "ArrowRight") go(row, column + 1);
    else if (event.key === "ArrowLeft") go(row, column - 1);
    else if (event.key === "ArrowDown") go(row + 1, column);
    else if (event.key === "ArrowUp") go(row - 1, column);
    else if (event.key === "Home") go(row, 0);
    else if (event.key === "End") go(row, first.length - 1);
    else if (event.key === "Enter" && at) onPick(at);
    else if (event.key === "Escape") setAt(null);
    else return;
    event.preventDefault();
  };
  return (
    <div class="heat-box">
      <div
        ref={box}
        class="tape"
        style={{ height: `${TOP + shown + AXIS}px` }}
        onScroll={(event) => setScrolled(event.currentTarget.scrollTop)}
      >
        <div style={{ height: `${TOP + layout.height + AXIS}px` }}>
          <canvas
            ref={canvas}
            data-testid="ranks-map"
            data-box={JSON.stringify([layout.left, TOP, layout.width, layout.rowHeight])}
            tabIndex={0}
            role="application"
            aria-roledescription="heat map"
            aria-label={spoken(answer)}
            onPointerDown={(event) => {
              if (event.button === 0) pressed.current = event.offsetX;
            }}
            onPointerMove={move}
            onPointerUp={release}
            onPointerLeave={() => ((pressed.current = null), setDragged(null), setAt(null))}
            onKeyDown={keys}
            onBlur={() => setAt(null)}
          />
        </div>
      </div>
      {dragged && (
        <span
          class="zoom-box"
          style={{ left: `${Math.min(...dragged)}px`, width: `${Math.abs(dragged[1] - dragged[0])}px`, top: `${TOP}px`, height: `${shown}px` }}
        />
      )}
      <div aria-live="polite">
        {at && <CellTip answer={answer} cell={at} {...tipPlace(layout, at, scrolled)} />}
      </div>
    </div>
  );
}

/** The right end of the cell. */
function tipPlace(layout: HeatLayout, { row, column }: Cell, scrolled: number): { x: number; y: number } {
  return { x: columnLeft(layout, column + 1), y: layout.top + (row + 0.5) * layout.rowHeight - scrolled };
}

function cellCanvas(answer: RanksAnswer, shares: boolean): HTMLCanvasElement {
  const cells = document.createElement("canvas");
  const columns = (cells.width = Math.max(1, answer.first.length));
  cells.height = Math.max(1, answer.rows.length);
  const style = getComputedStyle(document.documentElement);
  const colors = ramp(STOPS.map((name) => style.getPropertyValue(name).trim()));
  const values = answer.rows.map(({ bytes, capacity_bytes }) =>
    shares ? bytes.map((value) => (value === null || !capacity_bytes ? null : value / capacity_bytes)) : bytes,
  );
  const pixels = cellPixels(values, columns, colorRange(answer, shares), colors);
  cells.getContext("2d")?.putImageData(new ImageData(pixels, columns, cells.height), 0, 0);
  return cells;
}

function clamp(value: number, low: number, high: number): number {
  return Math.min(Math.max(value, low), high);
}

function spoken(answer: RanksAnswer): string {
  const { rows, count } = answer;
  const top = highestRank(rows);
  return (
    `${counted(rows.length, nounOf(rows))}${oneStep(rows) ? "" : ` over ${counted(count, "step")}`}; ` +
    `highest is ${visible(rankName(top, rows))}${oneStep(rows) ? "" : ` at step ${top.highest_step}`}. ` +
    "Arrow keys go from cell to cell, Enter picks one."
  );
}

interface TipProps {
  answer: RanksAnswer;
  cell: Cell;
  x: number;
  y: number;
}

/** What one cell is: whose, when, exactly how many bytes, and how far from the median rank. */
function CellTip({ answer, cell, x, y }: TipProps) {
  const figures = figuresOf(answer, cell);
  const { rank, bytes, first, last } = figures;
  const noun = nounOf(answer.rows);
  return (
    <Tip x={x} y={y} testid="ranks-tip">
      <div>
        <b class="mono">{cellText(rank.worker)}</b> {cellText(rank.device)}
        {!oneStep(answer.rows) && ` · ${columnWords(first, last)}`}
      </div>
      {bytes === null ? (
        <div>{first === last ? "Not recorded" : "None of them recorded"} on this {noun}.</div>
      ) : (
        <>
          <div class="tip-bytes">
            <strong>{withUnit(bytes)}</strong> · {exactBytes(bytes)}
          </div>
          {first !== last && <div>the highest of them, in step {figures.step}</div>}
          <div>{overMedian(figures, noun)}</div>
          {rank.capacity_bytes !== null && (
            <div>
              {percent(bytes, rank.capacity_bytes)} of {withUnit(rank.capacity_bytes)}
            </div>
          )}
        </>
      )}
    </Tip>
  );
}

function columnWords(first: number, last: number): string {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

/** Against the ranks or devices of the same column. */
export function overMedian({ bytes, median, ranks }: CellFigures, noun: "rank" | "device"): string {
  if (bytes === null || median === null) return `no other ${noun} has it`;
  const of = `the median of ${grouped(ranks)} ${noun}s`;
  if (bytes === median) return `as much as ${of}`;
  return `${deltaWithUnit(bytes - median, unitFor(bytes, median))} against ${of} (${exactBytes(bytes - median)})`;
}
