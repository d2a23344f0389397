import { useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { AllocationAnswer, BandsAnswer, StepAnswer } from "../../api/types";
import { columnsIn } from "../../draw/axes";
import { halfOf } from "../../draw/bands";
import { asPartOfPeak, navigate, route, stretch } from "../../state/app";
import { exactBytes, percent, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { overOf, OVERS, wholeOf, zoomOf, zoomPatch } from "../../state/over";
import type { Piece } from "../../state/sentences";
import { Swatch } from "../category";
import { divisionLabel, partLabel, useDivisions } from "../divisions";
import { Name } from "../name";
import { RouteChoice } from "../route_choice";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { lacksShapes } from "../tensor";
import { AllocationPanel } from "./allocation_panel";
import { AllocationTable } from "./allocation_table";
import { BandsChart } from "./bands_chart";

/** Bands: the paint takes them all, a screen has fewer pixels than that from top to bottom. */
const MOST = 3000;

/** Each large allocation as a band over its life, everything else as one, and all of them in a table. */
export function Allocations() {
  const shown = stretch.value!;
  const pick = shown.query;
  const [width, setWidth] = useState(0);
  const [hovered, setHovered] = useState<number | null>(null);
  const [alive, setAlive] = useState<number | null>(null);
  const over = overOf(route.value);
  const divisions = useDivisions(pick, ["category"]);
  const color = divisions.find((by) => by === route.value.colour) ?? "category";
  const zoom = zoomOf(route.value, over);
  const range = zoom ? { t0: zoom[0], t1: zoom[1] } : {};
  const folding = color === "module" && route.value.fold !== "off" ? { fold: "1", open: route.value.opened } : {}; // as in Timeline
  const px = columnsIn(width, 2400);
  const answer = useRemote<BandsAnswer>(
    width > 0 ? address("allocation_bands", { ...pick, over, ...range, px, colour: color, ...folding, most: MOST }) : null,
    zoom ? 40 : 0,
    ["t0", "t1", "px", "colour"],
  );
  const block = rowOf(route.value.block);
  const largest = answer.data && !answer.stale ? largestAtPeak(answer.data) : null;
  const row = hovered ?? block ?? largest;
  const one = useRemote<AllocationAnswer>(
    row === null ? null : address("allocation", { ...pick, row }),
    hovered === null ? 0 : 40,
    ["row"],
  );
  const untold = one.data?.category === "activation" && one.data.tensor === null;
  const step = useRemote<StepAnswer>(untold ? address("step", { ...pick }) : null).data;
  const data = answer.data;
  const whole = wholeOf(over, shown.from, shown.to, data);
  const zoomTo = ([t0, t1]: [number, number]): void => {
    const all = !whole || (t0 <= whole[0] && t1 >= whole[1]);
    navigate(zoomPatch(over, all ? null : [t0, t1]));
  };
  if (answer.failure) return <FailureState failure={answer.failure} />;
  return (
    <>
      {data && (
        <Headline pieces={headline(data, zoom !== undefined, shown.name)} />
      )}
      <div class="tools">
        <RouteChoice of="over" label="Over" testid="over" options={OVERS} value={over} />
        <label class="choose">
          <span>Color by</span>
          <select
            data-testid="color"
            value={color}
            onChange={(e) => navigate({ colour: e.currentTarget.value === "category" ? undefined : e.currentTarget.value })}
          >
            {divisions.map((by) => (
              <option key={by} value={by}>
                {divisionLabel(by)}
              </option>
            ))}
          </select>
        </label>
        {zoom && (
          <button type="button" class="toggle" data-testid="reset-zoom" onClick={() => whole && zoomTo(whole)}>
            Whole {shown.whole ? "window" : "step"}
          </button>
        )}
        <span class="hint">click keeps an allocation · drag or wheel to zoom · double-click or Esc to reset</span>
      </div>
      <div class="beside">
        <section class="card chart-card" aria-busy={answer.loading}>
          <BandsChart
            answer={data?.over === over ? data : undefined}
            color={color}
            window={zoom ?? whole}
            whole={whole}
            origin={shown.from}
            selected={block}
            life={block !== null && one.data && one.data.row === block && !one.stale ? one.data : undefined}
            onWidth={setWidth}
            onHover={setHovered}
            onPick={(to) => navigate({ block: to === null ? undefined : String(to) })}
            onZoom={zoomTo}
          />
          {!data && <Loading what="the allocations" />}
          {data && <BandsKey answer={data} color={color} alive={answer.stale ? null : alive} />}
        </section>
        <AllocationPanel
          one={one}
          row={row}
          shown={hovered !== null ? "pointed at" : block !== null ? "kept" : "largest"}
          origin={shown.from}
          lacksShapes={step !== undefined && lacksShapes(step)}
        />
      </div>
      <AllocationTable
        pick={pick}
        over={over}
        range={range}
        zoomed={zoom !== undefined}
        selected={block}
        withCode={divisions.includes("line")}
        withNames={divisions.includes("module") || divisions.includes("operator")}
        largest={Math.max(0, ...(data?.bands.bytes ?? []))}
        onAlive={setAlive}
      />
    </>
  );
}

/** "14 allocations make up half of the 8.48 GiB at the peak of step 0; the largest is 512 MiB." */
function headline(data: BandsAnswer, zoomed: boolean, name: string): Piece[] {
  const { peak, bands } = data;
  const size = { strong: asPartOfPeak(peak.bytes), exact: peak.bytes };
  const when = zoomed ? "at the highest moment shown" : `at the peak of ${name}`;
  const half = halfOf(data, peak.column);
  const alive = bands.bytes.filter((_, i) => bands.first[i]! <= peak.column && bands.last[i]! >= peak.column);
  const largest = alive.reduce((top, bytes) => Math.max(top, bytes), 0);
  const largestOne = { strong: asPartOfPeak(largest), exact: largest };
  if (largest === 0) return [size, ` are alive ${when}.`];
  if (!half) return [size, ` are alive ${when}, in allocations of no more than `, largestOne, "."];
  const few = half.count === 1 ? "One allocation makes up" : `${grouped(half.count)} allocations make up`;
  const pieces: Piece[] = [`${few} half of the `, size, ` alive ${when}`];
  if (half.count === 1) return [...pieces, "."];
  return [...pieces, "; the largest is ", largestOne, "."];
}

/** Until someone points at another one. */
function largestAtPeak({ bands, peak }: BandsAnswer): number | null {
  let best = -1;
  bands.bytes.forEach((bytes, i) => {
    const alive = bands.first[i]! <= peak.column && bands.last[i]! >= peak.column;
    if (alive && bytes > (bands.bytes[best] ?? 0)) best = i;
  });
  return bands.row[best] ?? null;
}

function rowOf(text: string | undefined): number | null {
  const row = Number(text);
  return text !== undefined && Number.isSafeInteger(row) && row >= 0 ? row : null;
}

interface Props {
  answer: BandsAnswer;
  color: string;
  /** How many allocations were alive in what is drawn; null while that is not known. */
  alive: number | null;
}

/** The colors, what share of the highest moment the small ones are, and how many are not drawn. */
function BandsKey({ answer, color, alive }: Props) {
  const { rest, peak, bands, others } = answer;
  const small = rest[peak.column] ?? 0;
  return (
    <>
      <ul class="legend" data-testid="bands-key">
        {answer.keys.map(
          (part, i) =>
            part.count > 0 && (
              <li key={part.key} title={`${exactBytes(part.bytes)} in ${grouped(part.count)} of the allocations shown`}>
                <Swatch by={color} of={part.key} index={i} />
                <Name text={partLabel(color, part.label)} prose />
              </li>
            ),
        )}
      </ul>
      <p class="foot" data-testid="bands-sum" title={others > 0 ? `${exactBytes(small)} in the smaller ones` : undefined}>
        {counted(bands.row.length, "allocation is", "allocations are")} drawn one by one
        {others > 0
          ? `; ${grouped(others)} others, none of them larger, lie on top in paler piles by ${divisionLabel(color).toLowerCase()}: ${withUnit(small)}, ${percent(small, peak.bytes)} of the highest moment shown`
          : ""}
        {alive !== null && absent(alive - bands.row.length - others, others > 0)}
        .
      </p>
    </>
  );
}

/** Of what lives between the highest moments of two columns, no column shows anything. */
function absent(count: number, piles: boolean): string {
  if (count <= 0) return piles ? "" : ": these are all";
  const which = piles ? counted(count, "more lives", "more live") : counted(count, "other lives", "others live");
  return `; ${which} too briefly to show here`;
}
