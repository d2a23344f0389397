import type { WholeJson, WholeMoment } from "../api/types";
import { exactBytes, inUnit, percent, type Unit, unitFor, withUnit } from "../state/bytes";
import { cellText, titleText } from "../state/names";
import { BytesCell } from "./amount";

/** The variable of each part's color, in the order of the bars. */
const COLORS: Record<string, string> = {
  requested: "--cat-parameter",
  allocated: "--cat-parameter",
  rounding: "--cat-temporary",
  cached: "--cat-buffer",
  private_pools: "--cat-recomputed",
  context: "--cat-optimizer_state",
  outside: "--cat-communication",
  other_processes: "--cat-gradient",
  driver: "--cat-workspace",
  resident: "--cat-parameter_copy",
  process: "--cat-parameter",
  children: "--cat-cache",
  files: "--cat-input",
  unknown: "",
  free: "--free",
};

function look(part: string): { background: string } {
  return { background: COLORS[part] ? `var(${COLORS[part]})` : "var(--hatch)" };
}

/** What fills the whole device at each moment that was read: a bar that sums to the whole, and the same as a table. */
export function WholeDevice({ whole }: { whole: WholeJson | null }) {
  if (!whole) return null;
  const full = Math.max(...whole.moments.map((moment) => moment.total_bytes));
  const unit = unitFor(full);
  const parts = new Map(whole.moments.flatMap((moment) => moment.parts.map(({ part, text }) => [text, part] as const))); // "not known" may be of more at another moment
  return (
    <section class="card" data-testid="whole-device">
      <h2>What fills {titleText(whole.name)}</h2>
      {whole.moments.map((moment) => (
        <Bar key={moment.moment} moment={moment} full={full} />
      ))}
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">{unit.name}</th>
            {whole.moments.map((moment) => (
              <th key={moment.moment} scope="col" class="number" title={titleText(moment.text)}>
                {cellText(moment.moment)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {ordered([...parts]).map(([text, part]) => (
            <tr key={text} data-testid="whole-part" data-key={part}>
              <th scope="row">
                <span class="swatch" style={look(part)} aria-hidden="true" />
                {titleText(text)}
              </th>
              {whole.moments.map((moment) => (
                <Amount key={moment.moment} moment={moment} text={text} unit={unit} />
              ))}
            </tr>
          ))}
          <tr data-testid="whole-total">
            <th scope="row">sum: {titleText(whole.name)}</th>
            {whole.moments.map((moment) => (
              <BytesCell key={moment.moment} bytes={moment.total_bytes} unit={unit} />
            ))}
          </tr>
        </tbody>
      </table>
      {whole.moments
        .filter((moment) => moment.read_at !== moment.moment)
        .map((moment) => (
          <p key={moment.moment} class="foot">
            {titleText(moment.text)}
          </p>
        ))}
    </section>
  );
}

/** In the order of the bars, where what is not known and what is free come last. */
function ordered(parts: [string, string][]): [string, string][] {
  const order = Object.keys(COLORS);
  return parts.sort(([, a], [, b]) => order.indexOf(a) - order.indexOf(b));
}

function Bar({ moment, full }: { moment: WholeMoment; full: number }) {
  const drawn = moment.parts.filter(({ bytes }) => bytes > 0);
  const words = moment.parts.map(({ text, bytes }) => `${titleText(text)} ${withUnit(bytes)}`).join(", ");
  return (
    <div class="whole-bar">
      <span class="muted">{cellText(moment.moment)}</span>
      <span class="bar" role="img" aria-label={`${titleText(moment.text)}: ${words}`}>
        <span class="fill" style={{ width: `${(100 * moment.total_bytes) / full}%` }}>
          {drawn.map(({ part, text, bytes }) => (
            <span
              key={part}
              style={{ ...look(part), flexGrow: bytes }}
              title={`${titleText(text)}: ${withUnit(bytes)}, ${percent(bytes, moment.total_bytes)}`}
              data-part={part}
            />
          ))}
        </span>
      </span>
    </div>
  );
}

function Amount({ moment, text, unit }: { moment: WholeMoment; text: string; unit: Unit }) {
  const found = moment.parts.find((part) => part.text === text);
  if (!found) return <td class="number muted">–</td>;
  return (
    <td class="number" title={`${titleText(found.text)}: ${exactBytes(found.bytes)}`}>
      {inUnit(found.bytes, unit)}
    </td>
  );
}
