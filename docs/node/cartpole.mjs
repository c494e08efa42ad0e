// CartPole as in Gymnasium (CartPole-v1): balance a pole on a cart by pushing it left (0) or right (1).

const GRAVITY = 9.8, CART = 1.0, POLE = 0.1, HALF_LENGTH = 0.5, FORCE = 10.0, SECONDS = 0.02;
const FARTHEST = 2.4, STEEPEST = (12 * Math.PI) / 180, LONGEST = 500;

export class CartPole {
  constructor(seed) {
    this.random = randomNumbers(seed);
  }

  reset() {
    this.state = Array.from({ length: 4 }, () => 0.1 * this.random() - 0.05);
    this.steps = 0;
    return [...this.state];
  }

  step(action) {
    let [x, speed, angle, turning] = this.state;
    const force = action === 1 ? FORCE : -FORCE;
    const cos = Math.cos(angle), sin = Math.sin(angle);
    const push = (force + POLE * HALF_LENGTH * turning ** 2 * sin) / (CART + POLE);
    const bend = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - (POLE * cos ** 2) / (CART + POLE)));
    const pull = push - (POLE * HALF_LENGTH * bend * cos) / (CART + POLE);
    x += SECONDS * speed;
    speed += SECONDS * pull;
    angle += SECONDS * turning;
    turning += SECONDS * bend;
    this.state = [x, speed, angle, turning];
    this.steps += 1;
    const terminated = Math.abs(x) > FARTHEST || Math.abs(angle) > STEEPEST;
    return { observation: [...this.state], reward: 1, terminated, truncated: !terminated && this.steps >= LONGEST };
  }
}

// Numbers between 0 and 1 that follow from a seed (mulberry32), so that a run can be repeated.
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}
