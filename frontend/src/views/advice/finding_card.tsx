import type { Evidence, Finding, Where } from "../../api/types";
import { linkTo, ruleName } from "../../state/advice";
import { alone } from "../../state/app";
import { exactBytes, type Unit, unitFor, withUnit } from "../../state/bytes";
import { capital, titleText } from "../../state/names";
import { Bytes } from "../amount";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Heads } from "../table";
import { FindingAction, FindingHead } from "./finding_text";

/** One thing to act on: what, how much, the evidence, what to do about it, and where to see it. */
export function FindingCard({ finding }: { finding: Finding }) {
  const { kind, level, levels } = finding;
  return (
    <section class={`card finding ${level}`} data-testid="finding" data-key={kind} data-level={level} aria-label={ruleName(kind)}>
      <FindingHead finding={finding} alone={alone.value} />
      {levels.length > 1 && <Levels levels={levels} />}
      <EvidenceTable rows={finding.evidence} />
      <FindingAction finding={finding} />
      <Show where={finding.where} />
    </section>
  );
}

function Show({ where }: { where: Where }) {
  const to = linkTo(where);
  if (!to) return null;
  return (
    <RouteLink to={to} class="action" testid="finding-link">
      Show it in {capital(where.view)}
    </RouteLink>
  );
}

function EvidenceTable({ rows }: { rows: Evidence[] }) {
  const unit = unitFor(...rows.map((row) => row.bytes));
  return (
    <table class="plain evidence">
      <Heads columns={["evidence", { number: unit.name }, { unseen: "detail" }]} />
      <tbody>
        {rows.map((row, i) => (
          <Row key={i} row={row} unit={unit} />
        ))}
      </tbody>
    </table>
  );
}

function Row({ row, unit }: { row: Evidence; unit: Unit }) {
  const to = row.where && linkTo(row.where);
  const what = row.name ? <Name text={row.what} module /> : <span>{titleText(row.what)}</span>;
  return (
    <tr data-testid="evidence" data-key={row.what}>
      <th scope="row">
        {to ? (
          <RouteLink to={to} testid="evidence-link">
            {what}
          </RouteLink>
        ) : (
          what
        )}
      </th>
      <td class="number">
        <Bytes bytes={row.bytes} unit={unit} />
      </td>
      <td class="muted breaking">{titleText(row.detail)}</td>
    </tr>
  );
}

const MOST = 120;

/** What is alive where one step ends and the next begins: a bar each, from zero. */
export function Levels({ levels }: { levels: number[] }) {
  const every = Math.ceil(levels.length / MOST);
  const shown = levels.filter((_, i) => i % every === 0 || i === levels.length - 1);
  const [first, last] = [levels[0]!, levels[levels.length - 1]!];
  const unit = unitFor(...levels);
  const most = Math.max(1, ...shown);
  const words = `alive between steps: ${withUnit(first, unit)} at first, ${withUnit(last, unit)} at the end`;
  return (
    <figure class="levels" data-testid="levels">
      <div class="levels-bars" role="img" aria-label={words}>
        {shown.map((bytes, i) => (
          <span key={i} class="level" title={exactBytes(bytes)} style={{ height: `${Math.max(2, (100 * bytes) / most)}%` }} />
        ))}
      </div>
      <figcaption class="muted">{words}</figcaption>
    </figure>
  );
}
