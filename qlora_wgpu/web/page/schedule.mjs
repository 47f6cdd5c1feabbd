/** Learning rates and bias corrections of every step, as training/optimizer.py. */

/** Rate of A, 1 - beta1^t, sqrt(1 - beta2^t), rate of B. */
export function stepRow(settings, total, step) {
  const rate = learningRate(settings, total, step);
  const t = step + 1;
  return new Float32Array([
    rate, 1 - settings.beta1 ** t, Math.sqrt(1 - settings.beta2 ** t), settings.loraplus * rate,
  ]);
}

/** Steps in which the rate grows. */
export function warmupSteps({ scheduler, warmup_steps: steps, warmup_ratio: ratio }, total) {
  return scheduler === 'constant' ? 0 : steps || Math.ceil(total * ratio);
}

/** The learning rate of a step, counted from 0. */
export function learningRate(settings, total, step) {
  const { scheduler, learning_rate: peak } = settings;
  const warmup = warmupSteps(settings, total);
  if (step < warmup) return peak * (step / Math.max(warmup, 1));
  const share = Math.min(Math.max((step - warmup) / Math.max(total - warmup, 1), 0), 1);
  if (scheduler === 'linear') return peak * (1 - share);
  if (scheduler === 'cosine') return peak * (0.5 * (1 + Math.cos(Math.PI * share)));
  return peak;
}
