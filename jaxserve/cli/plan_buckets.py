"""`jaxserve plan-buckets`: which shapes to compile, from the steps that an engine has run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from jaxserve.batch.bucket_expectation import Expectation
    from jaxserve.batch.bucket_plan import PlanTable

_MAX_SHAPES = 256


def plan_buckets(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="Steps that `--record-steps` of serve or batch wrote.", show_default=False
        ),
    ],
    shapes: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MAX_SHAPES, help="Most shapes to compile [default: as many as without a plan]."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.json", help="Write the plan, for `--bucket-plan` of serve and batch."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Most sequences in a step; the plan must hold them [default: the trace's]."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a step [default: the trace's].")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.json", help="Compare with this plan [default: what runs without a plan]."),
    ] = None,
    step_cost: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="What a step costs however few tokens it has, in tokens; says how much time padding takes.",
        ),
    ] = 20.0,
    row_cost: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="What a row of logits costs, in tokens: about vocabulary x hidden width / parameters of the layers.",
        ),
    ] = 0.25,
    typical_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Plan for this share of typical steps beside the trace's, so that sizes it lacks are not all "
            "rounded up to the limit.",
        ),
    ] = 0.05,
) -> None:
    """Choose the shapes that pad a recorded load least.

    Each shape (tokens, sequences) costs compile time and disk; too few of them cost padding in every step. Prints
    the best plan of so many shapes, what it expects on the trace, and the same of the shapes that run without a
    plan; and, with --output, writes it. /metrics shows what came: jaxserve:bucket_steps_total and
    jaxserve:bucket_padding_tokens_total.

    \b
    Example:
      jaxserve serve --model smollm2 --record-steps steps.jsonl
      jaxserve plan-buckets steps.jsonl --output plan.json
      jaxserve serve --model smollm2 --bucket-plan plan.json
    """
    # Imported here so that `jaxserve --help` needs no numpy.
    from jaxserve.batch.bucket_expectation import expect
    from jaxserve.batch.bucket_plan import StepCost, best_plans
    from jaxserve.batch.bucket_plan_file import read_plan, write_plan
    from jaxserve.batch.buckets import buckets_for, default_num_shapes, default_shapes
    from jaxserve.batch.step_sizes import StepLimits, typical_steps
    from jaxserve.batch.step_trace import read_trace

    recorded = read_trace(trace)
    limits = StepLimits(
        max_num_batched_tokens or recorded.limits.max_tokens, max_num_seqs or recorded.limits.max_seqs
    )
    if limits.max_tokens < limits.max_seqs:
        raise typer.BadParameter(
            f"--max-num-batched-tokens ({limits.max_tokens}) must be at least --max-num-seqs ({limits.max_seqs})"
        )
    largest = max((size for size in recorded.sizes.weights if not limits.allow(*size)), default=None)
    if largest is not None:
        raise typer.BadParameter(
            f"{trace} has a step of {largest[0]} tokens and {largest[1]} sequences, beyond the limits of "
            f"{limits.max_tokens} and {limits.max_seqs}: record with lower limits to plan for them"
        )
    cost = StepCost(step_cost, row_cost)
    other = read_plan(against) if against else default_shapes(limits)
    compared = expect(buckets_for(other, limits), recorded.sizes, cost)
    budget = shapes or default_num_shapes(limits)
    table = best_plans(
        recorded.sizes.mixed_with(typical_steps(limits), typical_share),
        limits,
        max_shapes=budget,
        cost=cost,
    )
    plan = table.plan(budget)
    expected = expect(buckets_for(plan, limits), recorded.sizes, cost)
    print(
        f"{recorded.num_steps} steps recorded; limits: {limits.max_tokens} tokens, {limits.max_seqs} sequences"
    )
    print(_comparison(expected, compared, "other plan" if against else "default"))
    print(_by_bucket(expected))
    print(_by_budget(table))
    if output is not None:
        write_plan(output, plan, expected, num_steps=recorded.num_steps)
        print(f"\nwritten to {output}; use it with --bucket-plan {output}")


def _comparison(plan: Expectation, other: Expectation, other_name: str) -> str:
    rows = [
        ("", "this plan", other_name),
        ("shapes", f"{len(plan.buckets)}", f"{len(other.buckets)}"),
        (
            "packing efficiency (useful / computed tokens)",
            f"{plan.packing_efficiency:.1%}",
            f"{other.packing_efficiency:.1%}",
        ),
        (
            "rows of logits (useful / computed)",
            f"{plan.row_efficiency:.1%}",
            f"{other.row_efficiency:.1%}",
        ),
        ("time that padding takes", f"{plan.time_lost:.1%}", f"{other.time_lost:.1%}"),
    ]
    return "\n".join(f"{name:46}{mine:>10}{theirs:>12}" for name, mine, theirs in rows)


def _by_bucket(plan: Expectation) -> str:
    lines = ["", "tokens   seqs   share of steps   useful tokens   useful rows   share of padding"]
    lines += [
        f"{entry.bucket.tokens:>6}{entry.bucket.seqs:>7}{entry.step_share:>17.1%}{entry.useful_tokens:>16.1f}"
        f"{entry.useful_rows:>14.1f}{entry.padding_share:>19.1%}"
        for entry in plan.buckets
    ]
    return "\n".join(lines)


def _by_budget(table: PlanTable) -> str:
    """What fewer shapes would cost, to choose --shapes by."""
    best = table.costs[-1]
    budgets = [k for k in (2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128) if k < len(table.costs)]
    if not budgets:
        return ""
    return "\nslower with fewer shapes: " + ", ".join(
        f"{k}: {table.costs[k - 1] / best - 1:.1%}" for k in budgets
    )
