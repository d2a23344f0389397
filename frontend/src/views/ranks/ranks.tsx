import { useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { Rank, RanksAnswer } from "../../api/types";
import { navigate, picked, route, selection } from "../../state/app";
import { exactBytes, inUnit, percent, unitFor, withUnit } from "../../state/bytes";
import { titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { stepsZoom } from "../../state/over";
import { cellOf, colorRange, figuresOf, highestRank, nounOf, oneStep, rankName, ranksSentence } from "../../state/ranks";
import { KeyEntry } from "../key_entry";
import { HowToRecord } from "../monitored/only_figures";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { RouteChoice } from "../route_choice";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { HeatMap, overMedian } from "./heat_map";
import { RankTable } from "./rank_table";
import { Why } from "./why";

/** Which rank peaks highest, when, how far from the others, and why: all workers of the picked run side by side. */
export function Ranks() {
  const { run, device } = picked.value!;
  const [px] = useState(() => Math.min(1000, Math.max(100, Math.floor((window.innerWidth - 220) / 200) * 100)));
  const of = route.value.measure === "reserved" ? "reserved" : "allocated";
  const [first, last] = stepsZoom(route.value) ?? [];
  const kind = device.split(":")[0];
  const answer = useRemote<RanksAnswer>(address("ranks", { run, device: kind, of, px, first, last }), 0, ["of", "px", "first", "last"]);
  const data = answer.data;
  if (answer.failure) return <FailureState failure={answer.failure} />;
  if (!data) return <Loading what="all ranks" />;
  if (data.rows.length < 2) return <OneRank rank={data.rows[0]!} />;
  const unit = unitFor(highestRank(data.rows).highest_bytes);
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      <Headline pieces={ranksSentence(data, unit)} />
      {data.of === "allocated" && <Why rows={data.rows} run={run} unit={unit} />}
      <Map answer={data} />
      <RankTable answer={data} run={run} unit={unit} />
      {selection.value!.stats === null && <HowToRecord />}
    </div>
  );
}

const LABELS = { allocated: "Allocated", reserved: "Reserved", capacity: "Of capacity" } as const;

function Map({ answer }: { answer: RanksAnswer }) {
  const options: (keyof typeof LABELS)[] = [...answer.offered];
  if (answer.rows.some((row) => row.capacity_bytes !== null)) options.push("capacity");
  const shares = route.value.measure === "capacity" && options.includes("capacity");
  const kept = cellOf(answer, picked.value!);
  const pick = (row: Rank, step: number): void => navigate({ worker: row.worker, device: row.device, step: String(step) });
  return (
    <section class="card ranks-card">
      <div class="tools">
        <h2>Peak of each {nounOf(answer.rows)}{oneStep(answer.rows) ? "" : " in each step"}</h2>
        {options.length > 1 && (
          <RouteChoice
            of="measure"
            label="Color"
            testid="measure"
            options={options.map((option) => [option, LABELS[option]] as const)}
            value={shares ? "capacity" : answer.of}
            usual="allocated"
          />
        )}
        {stepsZoom(route.value) && (
          <button type="button" class="quiet" data-testid="all-steps" onClick={() => navigate({ s0: undefined, s1: undefined })}>
            All steps
          </button>
        )}
        <Legend answer={answer} shares={shares} />
      </div>
      {answer.count === 0 ? (
        <p class="muted">No steps in this range.</p>
      ) : (
        <HeatMap
          answer={answer}
          shares={shares}
          kept={kept}
          onPick={(cell) => {
            const { rank, step } = figuresOf(answer, cell);
            if (step !== null) pick(rank, step);
          }}
          onZoom={(first, last) => last > first && navigate({ s0: String(first), s1: String(last) })}
        />
      )}
      {answer.count > answer.first.length && (
        <p class="foot" data-testid="columns-foot">
          {grouped(answer.count)} steps in {grouped(answer.first.length)} columns: a cell is the highest of its rank's steps
          there, to the byte. Drag over some to see them singly.
        </p>
      )}
      <Picked answer={answer} />
    </section>
  );
}

/** The colors with their numbers, and the marks. */
function Legend({ answer, shares }: { answer: RanksAnswer; shares: boolean }) {
  const [low, high] = colorRange(answer, shares);
  const unit = unitFor(high);
  const gaps = answer.rows.some((row) => row.bytes.includes(null) || (shares && row.capacity_bytes === null));
  return (
    <span class="ranks-legend" data-testid="ranks-legend">
      <KeyEntry look="frame-mark">highest</KeyEntry>
      {gaps && (
        <span class="key">
          <span class="swatch" style={{ background: "var(--hatch)" }} />
          not recorded
        </span>
      )}
      <span class="number" title={shares ? undefined : exactBytes(low)}>
        {shares ? "0 %" : inUnit(low, unit)}
      </span>
      <span class="ramp" aria-hidden="true" />
      <span class="number" title={shares ? undefined : exactBytes(high)}>
        {shares ? "100 % of the device" : withUnit(high, unit)}
      </span>
    </span>
  );
}

/** The picked cell in words, and the way to the step. */
function Picked({ answer }: { answer: RanksAnswer }) {
  const pick = picked.value!;
  const cell = cellOf(answer, pick);
  if (!cell) return <p class="foot">Click a cell to pick its rank and step; drag to zoom.</p>;
  const figures = figuresOf(answer, cell);
  const { rank, bytes, step } = figures;
  const when = oneStep(answer.rows) ? "" : ` in step ${step}`;
  return (
    <p class="foot" data-testid="ranks-picked">
      <Name text={rankName(rank, answer.rows)} chip />{" "}
      {bytes === null ? (
        `has no step ${pick.step}.`
      ) : (
        <>
          <strong class="amount" title={exactBytes(bytes)}>
            {withUnit(bytes)}
          </strong>
          {when}: {overMedian(figures, nounOf(answer.rows)).replace(/ \(.*/, "")}
          {rank.capacity_bytes !== null && `, ${percent(bytes, rank.capacity_bytes)} of the device`}.{" "}
          <RouteLink to={{ view: "overview", step: String(step) }} testid="ranks-overview">
            {when === "" ? "Overview" : `Overview of step ${step}`}
          </RouteLink>
        </>
      )}
    </p>
  );
}

/** With one rank there is nothing to put side by side: what would fill the view, and the way to what there is. */
function OneRank({ rank }: { rank: Rank }) {
  return (
    <section class="state wide-state" data-testid="one-rank">
      <h1>Only one rank is here: {titleText(rank.worker)}. There is nothing to compare it with.</h1>
      <p>
        With several, this view says which peaks highest, when, and how far above the others. Let every process write into
        the same folder; torchrun names them, otherwise name them yourself:
      </p>
      <pre class="code" data-testid="record-code">
        {`handler = memory_trace_handler(FOLDER, f"rank{rank}", model=model, optimizer=optimizer)  # a few steps in full
monitor = MemoryMonitor(FOLDER, f"rank{rank}")  # every step, figures only`}
      </pre>
      <p>Ranks that have not run yet can be estimated, without their GPUs:</p>
      <pre class="code">tb-memplugin estimate train.py:make --gpu h100 --mesh dp=8</pre>
      <p>
        <RouteLink to={{ view: "overview" }}>The Overview shows this rank's peaks.</RouteLink>
      </p>
    </section>
  );
}
