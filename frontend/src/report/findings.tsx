import { FindingAction, FindingHead } from "../views/advice/finding_text";
import type { Device } from "./recording";

/** What Advice says of the device. The page has no other views, so what is said leads nowhere. */
export function Findings({ device }: { device: Device }) {
  const { heading, findings } = device.advice;
  return (
    <section data-testid="advice" aria-label="Advice">
      <h2 class="report-advice">Advice: {heading}</h2>
      {findings.map((finding) => (
        <section key={finding.kind} class={`card finding ${finding.level}`} data-testid="finding" data-key={finding.kind}>
          <FindingHead finding={finding} />
          <FindingAction finding={finding} />
        </section>
      ))}
    </section>
  );
}
