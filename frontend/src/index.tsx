/** TensorBoard imports this module into our frame and calls render(). */
import { render as mount } from "preact";
import { followTheme } from "./host/theme";
import { start } from "./state/app";
import adviceStyle from "./views/style/advice.css?inline";
import allocatorStyle from "./views/style/allocator.css?inline";
import stacksStyle from "./views/style/stacks.css?inline";
import tableStyle from "./views/style/tables.css?inline";
import controlStyle from "./views/style/controls.css?inline";
import stateStyle from "./views/style/states.css?inline";
import fleetStyle from "./views/style/fleet.css?inline";
import rankStyle from "./views/style/ranks.css?inline";
import shellStyle from "./views/style/shell.css?inline";
import themeStyle from "./views/style/theme.css?inline";
import viewStyle from "./views/style/views.css?inline";
import { Shell } from "./views/shell";

export function render(): void {
  const style = document.createElement("style");
  style.textContent = [
    themeStyle,
    shellStyle,
    controlStyle,
    stateStyle,
    tableStyle,
    viewStyle,
    allocatorStyle,
    stacksStyle,
    adviceStyle,
    rankStyle,
    fleetStyle,
  ].join("\n");
  document.head.append(style);
  document.documentElement.lang = "en";
  document.title = "Memory";
  followTheme();
  start();
  const root = document.createElement("div");
  root.id = "memory-tab";
  document.body.append(root);
  mount(<Shell />, root);
}
