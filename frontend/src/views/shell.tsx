import { useEffect, useRef } from "preact/hooks";
import { failing } from "../api/remote";
import { type Failure, late } from "../api/request";
import type { RunsAnswer } from "../api/types";
import { arrive } from "../host/scroll";
import { route, runs, runsFailure, selection, tryAgain } from "../state/app";
import { capital } from "../state/names";
import { VIEWS, type View } from "../state/route";
import { Advice } from "./advice/advice";
import { Allocations } from "./allocations/allocations";
import { Allocator } from "./allocator/allocator";
import { Compare } from "./compare/compare";
import { Modules } from "./modules/modules";
import { Fleet } from "./fleet/fleet";
import { MonitoredOverview } from "./monitored/monitored_overview";
import { OnlyFigures } from "./monitored/only_figures";
import { Notice, Problems } from "./notices";
import { Overview } from "./overview/overview";
import { MissingPicks, Pickers } from "./pickers";
import { Ranks } from "./ranks/ranks";
import { RouteLink } from "./route_link";
import { Stacks } from "./stacks/stacks";
import { EmptyState, FailureState, Loading } from "./states";
import { Timeline } from "./timeline/timeline";

const CONTENT: Record<View, () => preact.JSX.Element> = {
  overview: () => <Overview />,
  timeline: () => <Timeline />,
  modules: () => <Modules />,
  allocations: () => <Allocations />,
  stacks: () => <Stacks />,
  allocator: () => <Allocator />,
  compare: () => <Compare />,
  ranks: () => <Ranks />,
  fleet: () => <Fleet />,
  advice: () => <Advice />,
};

/** Views that show figures of a monitor as they show what was recorded in full. */
const ALSO_OF_FIGURES: ReadonlySet<View> = new Set(["ranks", "fleet", "advice"]);

/** One line of pickers, one line of views, then the content. */
export function Shell() {
  const answer = runs.value;
  const failure = runsFailure.value;
  const trouble = <Trouble failures={[...(failure ? [failure] : []), ...failing.value, ...late.value]} />;
  if (!answer)
    return (
      <main class="content">
        {late.value.length > 0 && trouble}
        {failure ? <FailureState failure={failure} /> : <Loading what="the runs" />}
      </main>
    );
  if (!selection.value) {
    return (
      <main class="content">
        <Problems problems={answer.problems} />
        <EmptyState logdir={answer.logdir} empty={answer.runs.length} />
      </main>
    );
  }
  return <Views answer={answer} trouble={trouble} />;
}

function Views({ answer, trouble }: { answer: RunsAnswer; trouble: preact.JSX.Element }) {
  const view = route.value.view;
  const content = useRef<HTMLElement>(null);
  useEffect(() => {
    // A link that was followed is gone with its view: the keyboard goes on in the new one.
    if (document.hasFocus() && document.activeElement === document.body) content.current?.focus({ preventScroll: true });
    return arrive();
  }, [view]);
  return (
    <>
      <header class="top">
        <button type="button" class="skip" data-testid="skip" onClick={() => content.current?.focus()}>
          Skip to {capital(view)}
        </button>
        <Pickers />
        <Tabs current={view} />
      </header>
      <main class="content" ref={content} tabIndex={-1} data-testid={`view-${view}`}>
        <Problems problems={answer.problems} />
        {trouble}
        <MissingPicks />
        {selection.value!.stats || ALSO_OF_FIGURES.has(view) ? CONTENT[view]() : view === "overview" ? <MonitoredOverview /> : <OnlyFigures />}
      </main>
    </>
  );
}

/** What of the view could not be read, where the view does not say it itself. */
function Trouble({ failures }: { failures: readonly Failure[] }) {
  const [first] = failures;
  if (!first) return null;
  return (
    <div class="trouble over-cards">
      <Notice level="warning" testid="trouble">
        {first.what} What is shown may be old or lack parts: {[...new Set(failures.map(({ where }) => where))].join(", ")}. {first.fix}{" "}
        <button type="button" class="quiet" onClick={tryAgain}>
          Try again
        </button>
      </Notice>
    </div>
  );
}

function Tabs({ current }: { current: View }) {
  const tabs = useRef<HTMLElement>(null);
  useEffect(() => tabs.current!.querySelector(".current")!.scrollIntoView({ block: "nearest", inline: "nearest" }), [current]);
  return (
    <nav class="tabs" aria-label="Views" ref={tabs}>
      {VIEWS.map((view) => (
        <RouteLink key={view} to={{ view }} class={view === current ? "tab current" : "tab"} testid={`tab-${view}`}>
          <span aria-current={view === current ? "page" : undefined} data-text={capital(view)}>
            {capital(view)}
          </span>
        </RouteLink>
      ))}
    </nav>
  );
}
