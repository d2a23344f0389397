import type { ComponentChildren } from "preact";
import { address, type Query } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { RuleTableAnswer } from "../../api/types";
import { colorVariable } from "../../draw/palette";
import { navigate, route } from "../../state/app";
import { percent, unitFor } from "../../state/bytes";
import { titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { Swatch } from "../category";
import { Name } from "../name";
import { ShareBar, ShareHead } from "../share_bar";
import { SAME_RUN } from "./choice";
import { Tools } from "./ranked";
import { BytesCell } from "../amount";

const EXAMPLE = "attention=attn|sdpa\nmlp=mlp|feed_forward\nloss=cross_entropy|loss\noptimizer=optim/";

/** Names that people give to stacks by patterns; what they type stays in the address. */
export function RuleTable({ query, picker }: { query: Query; picker: ComponentChildren }) {
  const { rules = "" } = route.value;
  const answer = useRemote<RuleTableAnswer>(address("rule_table", { ...query, rules }), 250, SAME_RUN);
  const { data, failure } = answer;
  const unit = unitFor(data?.bytes ?? 0);
  const rows = data?.rows ?? [];
  const widest = rows.reduce((top, row) => Math.max(top, row.bytes), 0);
  return (
    <>
      <Tools picker={picker}>
        <span class="hint">one rule a line: name=regular expression · the first that matches a frame's function or file counts</span>
      </Tools>
      <div class="rules">
        <div>
          <textarea
            class="mono"
            aria-label="Rules, one a line: name=regex"
            aria-invalid={failure !== undefined}
            aria-describedby={failure ? "rules-failure" : undefined}
            data-testid="rules"
            spellcheck={false}
            maxLength={4000}
            rows={8}
            placeholder={EXAMPLE}
            value={rules}
            onInput={(e) => navigate({ rules: e.currentTarget.value || undefined })}
          />
          {rules === "" && (
            <button type="button" class="small" data-testid="rules-example" onClick={() => navigate({ rules: EXAMPLE })}>
              try these
            </button>
          )}
          {failure && (
            <p class="rules-failure" id="rules-failure" role="alert" data-testid="rules-failure">
              {titleText(failure.what)} <span class="muted">{titleText(failure.fix)}</span>
            </p>
          )}
        </div>
        <table class={answer.stale ? "plain stale" : "plain"} aria-busy={answer.stale}>
          <ShareHead name="rule" unit={unit} />
          <tbody>
            {rows.map((row, i) => (
              <tr key={row.key} data-testid="rule-row" data-key={row.key}>
                <th scope="row">
                  <span class="flexed">
                    <Swatch by="rule" of={row.key} index={i} />
                    <Name text={row.key} />
                  </span>
                </th>
                <td>
                  <ShareBar
                    share={row.bytes / widest}
                    background={i === rows.length - 1 ? "var(--hatch)" : `var(${colorVariable("rule", row.key, i)})`}
                  />
                </td>
                <BytesCell bytes={row.bytes} unit={unit} tone="strong" />
                <td class="number muted">{percent(row.bytes, data!.bytes)}</td>
                <td class="number muted">{grouped(row.count)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
