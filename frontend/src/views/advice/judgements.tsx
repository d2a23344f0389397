import type { Judgement } from "../../api/types";
import { RULES } from "../../api/contract";
import { ruleName } from "../../state/advice";
import { titleText } from "../../state/names";

/** The rules without a finding: what each looked for, and what it saw, or what it lacked. */
export function Judgements({ judgements, alone }: { judgements: Judgement[]; alone: boolean }) {
  if (judgements.length === 0) return null;
  return (
    <section class="card" data-testid="judgements" aria-label="Rules without a finding">
      <h2>{alone ? "Looked for" : "Also looked for"}</h2>
      <table class="plain judgements">
        <tbody>
          {judgements.map(({ kind, verdict, why }) => (
            <tr key={kind} data-testid="judgement" data-key={kind} data-verdict={verdict}>
              <td class="verdict">
                <span class={verdict === "fine" ? "pill well" : "pill"}>{verdict}</span>
              </td>
              <th scope="row">
                <div>{ruleName(kind)}</div>
                <div class="muted looks">{RULES[kind]?.looks ?? ""}</div>
              </th>
              <td class="breaking">{titleText(why)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
