import { cellText, titleText } from "../../state/names";

/** What the source tells of the allocator's settings and of itself. */
export function Settings({ settings }: { settings: Record<string, string> }) {
  const rows = Object.entries(settings).filter(([, value]) => value !== "");
  if (rows.length === 0) return null;
  return (
    <section class="card" data-testid="settings" aria-label="Settings">
      <h2>Settings</h2>
      <dl class="settings">
        {rows.map(([name, value]) => (
          <div key={name}>
            <dt class="mono" title={titleText(name)}>
              {cellText(name)}
            </dt>
            <dd class="mono breaking" title={titleText(value)}>
              {cellText(value)}
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
