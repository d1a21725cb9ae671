/** Says in words what a drawing shows where the pointer is, or the keyboard has walked to. */

const STEPS = { ArrowRight: 1, ArrowLeft: -1 };

/**
 * Write into `output` the `data-detail` of what is pointed at in `band`. A drawing that has the
 * focus is walked through with the arrow keys.
 */
export function readOut(band, output) {
  const say = (target) => {
    output.textContent = target?.closest("[data-detail]")?.dataset.detail ?? "";
  };
  band.addEventListener("pointerover", (event) => say(event.target));
  band.addEventListener("pointerleave", () => say(currentOf(document.activeElement)));
  band.addEventListener("focusin", (event) => say(event.target));
  band.addEventListener("focusout", (event) => {
    currentOf(event.target)?.removeAttribute("data-current");
    say(null);
  });
  band.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || !event.target.matches("[data-detail]")) return;
    event.preventDefault();
    say(walked(event.target, step));
  });
}

function walked(drawing, step) {
  const parts = [...drawing.querySelectorAll("[data-detail]")];
  if (!parts.length) return drawing;
  const current = currentOf(drawing);
  const from = current ? parts.indexOf(current) : step > 0 ? -1 : parts.length;
  const next = parts[Math.min(parts.length - 1, Math.max(0, from + step))];
  current?.removeAttribute("data-current");
  next.setAttribute("data-current", "");
  return next;
}

function currentOf(drawing) {
  return drawing?.querySelector?.("[data-current]") ?? null;
}
