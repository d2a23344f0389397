import type { AdviceAnswer, Finding } from "../../api/types";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import { alone } from "../../state/app";
import { adviceHeadline, linkTo, titleOf } from "../../state/advice";
import { capital } from "../../state/names";
import { plain } from "../../state/sentences";
import { asPartOf, exactBytes, percent, withUnit } from "../../state/bytes";
import type { Pick } from "../../state/selection";
import { RouteLink } from "../route_link";
import { Sentence } from "../sentence";

const MOST = 4;

/** What the advice found, a line each, in a card that is there from the beginning; nothing where there is none. */
export function Findings({ pick }: { pick: Pick }) {
  const { data: answer, failure } = useRemote<AdviceAnswer>(address("advice", { ...pick }));
  if (failure) return null;
  return (
    <section class="card" data-testid="findings" aria-busy={!answer}>
      <div class="row">
        <h2 class="grow">Findings</h2>
        <RouteLink to={{ view: "advice" }}>Advice</RouteLink>
      </div>
      {!answer && <p class="muted">Looking for what could be saved …</p>}
      {answer?.findings.length === 0 && <p class="muted">{plain(adviceHeadline(answer, alone.value))}</p>}
      <table class="plain findings">
        <tbody>
          {answer?.findings.slice(0, MOST).map((finding) => (
            <Line key={finding.kind} finding={finding} />
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Line({ finding }: { finding: Finding }) {
  const { kind, bytes, of_bytes, measure, where } = finding;
  const to = linkTo(where);
  return (
    <tr data-testid="finding-line" data-key={kind}>
      <td class="number strong" title={exactBytes(bytes)}>
        {asPartOf(of_bytes, bytes)}
      </td>
      <td class="breaking">
        <Sentence pieces={titleOf(finding)} />
        <span class="under muted">
          {measure}, {percent(bytes, of_bytes)} of {withUnit(of_bytes)}
        </span>
      </td>
      <td class="number">{to && <RouteLink to={to}>{capital(where.view)}</RouteLink>}</td>
    </tr>
  );
}
