import type { Rank } from "../../api/types";
import { titleText } from "../../state/names";
import { RouteLink } from "../route_link";

/** With one rank there is nothing to put side by side: what would fill the view, and the way to what there is. */
export function OneRank({ rank }: { rank: Rank }) {
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
