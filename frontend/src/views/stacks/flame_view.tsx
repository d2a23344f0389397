import { useMemo } from "preact/hooks";
import { type Frame, ROOT, type StacksAnswer, WITHOUT } from "../../api/types";
import { toneOf } from "../../draw/flame";
import type { Bar, Paints } from "../../draw/paint_flame";
import { navigate } from "../../state/app";
import { asPartOf, exactBytes, percent, withUnit } from "../../state/bytes";
import { frameName, framePath, frameWhere } from "../../state/frames";
import { titleText } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import { FlameChart } from "../flame_chart";
import { KeyEntry } from "../key_entry";
import { Tensor } from "../tensor";

/** Which frames the graph shows. */
export const FRAMES = [
  ["folded", "Folded"],
  ["all", "Every frame"],
  ["user", "Your code"],
] as const;

interface Props {
  answer: StacksAnswer;
  searching: boolean;
  frames: (typeof FRAMES)[number][0];
}

/** Calls from the outermost frame at the top; as wide as the bytes that they allocated. */
export function FlameView({ answer, searching, frames }: Props) {
  const look = useMemo(() => frameBars(answer, searching), [answer, searching]);
  return (
    <section class="card flame-card">
      <div class="row">
        <h2 class="grow">
          {answer.of === "step" ? "Allocated bytes" : "Live bytes"} by call stack, outermost frame at the top
        </h2>
        <FlameKey without={answer.nodes.label.includes(WITHOUT)} />
        {answer.node !== 0 && (
          <button type="button" class="small" data-testid="flame-reset" onClick={() => navigate({ node: undefined })}>
            all stacks
          </button>
        )}
      </div>
      <FlameChart
        testid="flame"
        level={21}
        tree={answer.nodes}
        zoom={answer.node}
        look={look}
        label={spoken(answer)}
        tip={(place) => <FlameTip answer={answer} place={place} />}
        tipKey={(place) => answer.nodes.id[place]!}
        fresh={[answer.event, answer.of, answer.node, frames]}
        onZoom={(place) => navigate({ node: place === 0 ? undefined : String(answer.nodes.id[place]) })}
      />
      <p class="foot">
        click or Enter zooms in, Esc zooms out, arrow keys walk from frame to frame
        {frames === "folded" && " · +3 stands for three more frames that all share"}
        {answer.omitted > 0 && ` · ${grouped(answer.omitted)} narrower than half a pixel: zoom in for more`}
      </p>
    </section>
  );
}

function FlameKey({ without }: { without: boolean }) {
  return (
    <span class="keys" aria-hidden="true">
      <KeyEntry look="swatch flame-user">your code</KeyEntry>
      <KeyEntry look="swatch flame-library">libraries</KeyEntry>
      <KeyEntry look="swatch flame-native">C++</KeyEntry>
      {without && (
        <KeyEntry look="swatch flame-none">no stack</KeyEntry>
      )}
    </span>
  );
}

/** The picture in words: the widest frames. */
function spoken(answer: StacksAnswer): string {
  const { nodes, frames } = answer;
  const widest = nodes.label
    .map((label, place) => ({ label, place }))
    .filter(({ label, place }) => label >= 0 && nodes.bytes[place]! < answer.bytes)
    .slice(0, 400)
    .sort((a, b) => nodes.bytes[b.place]! - nodes.bytes[a.place]!)
    .slice(0, 6)
    .map(({ label, place }) => `${frameName(frames[label]!)} ${percent(nodes.bytes[place]!, answer.bytes)}`);
  return `Flame graph of ${withUnit(answer.bytes)} (${exactBytes(answer.bytes)}) by call stack. ${widest.join(", ")}. Arrow keys walk, Enter zooms.`;
}

const MOST = 9;

interface TipProps {
  answer: StacksAnswer;
  place: number;
}

/** A node in words: its frames, its exact bytes, its share, how many allocations, what ends in it. */
function FlameTip({ answer, place }: TipProps) {
  const { nodes, frames } = answer;
  const bytes = nodes.bytes[place]!;
  const label = nodes.label[place]!;
  const run = nodes.run[place]!.map((row) => frames[row]!);
  const python = run.filter((frame) => frame.kind !== "native");
  const native = python.length > 0 ? run.length - python.length : 0;
  const zoom = nodes.bytes[nodes.id.indexOf(answer.node)] ?? answer.bytes;
  return (
    <>
      <div class="tip-bytes">
        <strong title={exactBytes(bytes)}>{asPartOf(answer.bytes, bytes)}</strong> · {exactBytes(bytes)}
      </div>
      <div>
        {percent(bytes, answer.bytes)} of {answer.of === "step" ? "all allocated" : "all alive"}
        {answer.node !== 0 && `, ${percent(bytes, zoom)} of the zoomed frame`} · {counted(nodes.count[place]!, "allocation")}
        <Tensor text={nodes.tensor[place]!} />
      </div>
      {nodes.own[place]! > 0 && nodes.own[place] !== bytes && <div>{exactBytes(nodes.own[place]!)} end in this frame</div>}
      {label === ROOT && <div class="tip-frame">all allocations</div>}
      {label === WITHOUT && <div class="tip-frame">no stack was recorded: allocated before recording began, or by code without Python</div>}
      <ol>
        {shown(python.length > 0 ? python : run).map((frame, i) =>
          typeof frame === "number" ? (
            <li key={i}>{grouped(frame)} more</li>
          ) : (
            <li key={i} class={`tip-frame ${frame.kind}`}>
              <b>{short(frame.function, 120)}</b> {short(framePath(frame), 160)}
              {frame.fx && <span> fx {short(frame.fx, 160)}</span>}
            </li>
          ),
        )}
        {native > 0 && <li class="tip-frame native">and {grouped(native)} of C++</li>}
      </ol>
    </>
  );
}

/** The first and last frames of a long run, and between them how many are left out. */
function shown(run: readonly Frame[]): (Frame | number)[] {
  if (run.length <= MOST) return [...run];
  const head = Math.ceil((MOST - 1) / 2);
  const tail = MOST - 1 - head;
  return [...run.slice(0, head), run.length - head - tail, ...run.slice(run.length - tail)];
}

function short(text: string, most: number): string {
  const whole = titleText(text);
  return whole.length <= most ? whole : `${whole.slice(0, most / 2)}…${whole.slice(-most / 2)}`;
}

/** How frames look in the flame graph: the user's code warm, libraries cool, C++ gray. */
const TONES = { user: 4, library: 3, native: 2 };

function frameBars({ nodes, frames }: StacksAnswer, searching: boolean): (paints: Paints) => (place: number) => Bar {
  return ({ read, category }) =>
    (place) => {
      const label = nodes.label[place]!;
      if (label === ROOT)
        return { fill: read("--flame-root"), name: "all allocations", more: "", strong: true, ink: read("--text"), found: searching && nodes.found[place] ? true : undefined };
      const found = searching ? nodes.found[place] === 1 : undefined;
      const frame: Frame | undefined = frames[label];
      if (label === WITHOUT || !frame) {
        const name = "no stack was recorded";
        return { fill: category("unknown"), name, more: "", strong: false, ink: read("--text"), found, plate: true };
      }
      const others = nodes.run[place]!.length - 1;
      return {
        fill: read(`--flame-${frame.kind}-${toneOf(frame.file, TONES[frame.kind])}`),
        name: frameName(frame),
        more: `${frameWhere(frame)}${others > 0 ? `  +${others}` : ""}`,
        strong: frame.kind === "user",
        ink: read(`--flame-${frame.kind}-text`),
        found,
      };
    };
}
