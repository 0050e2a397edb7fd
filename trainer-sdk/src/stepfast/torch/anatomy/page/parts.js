
// The anatomy's parts, for its three charts: names, colours.

const report = data;
const memory = report.memory;
const COMPONENTS = ["weights", "optimizer", "gradients", "activations", "temporary", "buffers", "inputs", "communication", "context"];
const CLASSES = ["contraction", "normalisation", "element-wise"];

const colourClass = (name) => `c-${COMPONENTS.includes(name) || CLASSES.includes(name) ? name : "other"}`;
const colour = (name) => `var(--${colourClass(name).slice(2)})`;
