/** Numbers in answers that stand for something: states of `Pieces`, labels of `Nodes`. */

export const ALLOCATED = 0;
export const PENDING = 1;
export const FREE = 2;

export const ROOT = -1;
export const WITHOUT = -2;
