/** Follows TensorBoard's own theme: class dark-mode on its body; the system's where there is no such page above. */
import { signal } from "@preact/signals";

export const dark = signal(false);

function hostBody(): HTMLElement | null {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // another origin above us
  }
}

/** Starts following; returns how to stop. */
export function followTheme(): () => void {
  const body = hostBody();
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const read = (): void => {
    dark.value = body ? body.classList.contains("dark-mode") : system.matches;
    document.documentElement.classList.toggle("dark", dark.value);
  };
  read();
  if (!body) {
    system.addEventListener("change", read);
    return () => system.removeEventListener("change", read);
  }
  const observer = new MutationObserver(read);
  observer.observe(body, { attributes: true, attributeFilter: ["class"] });
  return () => observer.disconnect();
}
