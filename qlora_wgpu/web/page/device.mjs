/** Opening a GPU: sentences for what is missing, limits as the plans need them. */

/** A mistake or a lack that a sentence tells; the page shows it as it is. */
export class Told extends Error {}

/** There is no GPU now, which may be so for a while after one was lost. */
export class NoGpu extends Told {}

const SWITCHES = [
  [/Firefox/, 'Firefox: open about:config and set dom.webgpu.enabled to true'],
  [/Edg\//, 'Edge: open the page edge:flags and enable "Unsafe WebGPU Support"'],
  [/Chrom/, 'Chrome: open the page chrome:flags and enable "Unsafe WebGPU Support"; on Linux, "Vulkan" too'],
  [/Safari/, 'Safari: version 26 and later have it; in earlier ones see Settings, Feature Flags, WebGPU'],
];

/** What to do in this browser to get WebGPU. */
export function remedy(userAgent) {
  const found = SWITCHES.find(([pattern]) => pattern.test(userAgent));
  return found ? found[1] : 'use a current Chrome, Edge, Firefox or Safari';
}

/**
 * The variants of a site whose kernels are cut for a vendor's GPUs; those for all others if it has none.
 *
 * @template {{vendors: string[]}} V
 * @param {V[]} variants
 * @param {string} vendor
 * @returns {V[]}
 */
export function cutFor(variants, vendor) {
  const own = variants.filter(({ vendors }) => vendors.includes(vendor));
  return own.length ? own : variants.filter(({ vendors }) => !vendors.length);
}

/**
 * Opens a device that keeps to what the plans need.
 *
 * @param {GPU} gpu navigator.gpu, or undefined.
 * @param {Record<string, number>} needs Limits by WebGPU's names.
 * @param {string} userAgent The browser, for messages.
 * @returns {Promise<{device: GPUDevice, vendor: string}>} With the vendor as WebGPU names it, '' if it does not.
 * @throws {Told} If there is none.
 */
export async function openDevice(gpu, needs, userAgent = '') {
  if (!gpu) throw new Told(`This browser offers no WebGPU. ${remedy(userAgent)}.`);
  const adapter = await gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) {
    throw new NoGpu(`This browser finds no GPU that it would use. ${remedy(userAgent)}, and update the GPU's driver.`);
  }
  const requiredLimits = {};
  for (const [name, value] of Object.entries(needs)) {
    if (value > adapter.limits[name]) {
      throw new Told(`This model needs ${name} = ${value.toLocaleString('en')}, and this GPU allows ` +
        `${adapter.limits[name].toLocaleString('en')}: take a smaller model, or another machine.`);
    }
    // Less than the default is an error in no browser, but says nothing either.
    requiredLimits[name] = value;
  }
  try {
    const device = await adapter.requestDevice({ requiredLimits }); // no kernel of a page needs a feature
    return { device, vendor: adapter.info?.vendor ?? '' };
  } catch (error) {
    throw new NoGpu(`The GPU could not be opened: ${error.message}`);
  }
}
