package org.missioncontrol.workloads;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import java.util.zip.CRC32;
import org.missioncontrol.Call;
import org.missioncontrol.Context;
import org.missioncontrol.Outcome;
import org.missioncontrol.Reference;
import org.missioncontrol.Spawned;
import org.missioncontrol.Task;

/**
 * k-means without a driver program: each reduce task spawns the map tasks of the next iteration, and delegates its
 * result to their reduce task. The tasks of {@code mission run kmeans --engine java}; they compute what those in Python do.
 */
public final class KMeans {
    private static final int ITERATIONS_MAX = 300;

    private KMeans() {}

    /**
     * Values that are the same in all iterations.
     *
     * @param columns coordinates of a point
     * @param tolerance a smaller squared shift is none
     */
    record Plan(int columns, double tolerance) {}

    /** How the centres moved in an iteration. */
    record Move(double shift, long counted, List<Long> labels) {}

    record State(Plan plan, List<Move> moves, int maps) {}

    private static double[] numbersOf(Context context, Reference reference, int part) throws IOException {
        byte[] content = context.fetch(reference, part);
        double[] numbers = new double[content.length / Double.BYTES];
        ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).asDoubleBuffer().get(numbers);
        return numbers;
    }

    private static ByteBuffer bytesOf(double[] numbers) {
        ByteBuffer content = ByteBuffer.allocate(numbers.length * Double.BYTES).order(ByteOrder.LITTLE_ENDIAN);
        content.asDoubleBuffer().put(numbers);
        return content;
    }

    private static void iterate(Context context, State state, Reference centres, List<Reference> points)
            throws IOException {
        List<Spawned> sums = new ArrayList<>();
        for (Reference own : points) {
            sums.add(context.spawn(Call.java(Assign.class).input(own).input(centres).arguments(state.plan())));
        }
        context.tailSpawn(Call.java(Update.class).input(centres).inputs(sums).inputs(points).arguments(state));
    }

    /** Inputs: the first centres, and the points. Result: all moves, and the last centres. */
    public static final class Begin implements Task {
        @Override
        public Object run(Context context) throws IOException {
            List<Reference> inputs = context.inputs();
            Plan plan = context.arguments(Plan.class);
            State state = new State(plan, List.of(), inputs.size() - 1);
            iterate(context, state, inputs.get(0), inputs.subList(1, inputs.size()));
            return null;
        }
    }

    /**
     * The nearest centre of each point. Inputs: points, and centres. Result: an object of three parts: of each centre the
     * sum of its points and their number; points that are far from their centres, as squared distance, centre and
     * coordinates; a checksum of the labels.
     */
    public static final class Assign implements Task {
        @Override
        public Object run(Context context) throws IOException {
            Stopwatch watch = new Stopwatch();
            int columns = context.arguments(Plan.class).columns();
            double[] points = numbersOf(context, context.inputs().get(0), 0);
            double[] centres = numbersOf(context, context.inputs().get(1), 0);
            int rows = points.length / columns;
            int k = centres.length / columns;
            double[] sums = new double[k * (columns + 1)];
            double[] distances = new double[rows];
            int[] labels = new int[rows];
            for (int row = 0; row < rows; row++) {
                int nearest = 0;
                double least = Double.POSITIVE_INFINITY;
                for (int centre = 0; centre < k; centre++) {
                    double distance = 0;
                    for (int column = 0; column < columns; column++) {
                        double difference = points[row * columns + column] - centres[centre * columns + column];
                        distance += difference * difference;
                    }
                    if (distance < least) {
                        least = distance;
                        nearest = centre;
                    }
                }
                labels[row] = nearest;
                distances[row] = least;
                int sum = nearest * (columns + 1);
                for (int column = 0; column < columns; column++) {
                    sums[sum + column] += points[row * columns + column];
                }
                sums[sum + columns]++;
            }
            double[] far = far(points, columns, labels, distances, empty(sums, columns));
            Reference made = context.put(bytesOf(sums), bytesOf(far), checksum(labels));
            context.notePhases(Map.of("map_s", watch.seconds()));
            return made;
        }

        private static int empty(double[] sums, int columns) {
            int empty = 0;
            for (int number = columns; number < sums.length; number += columns + 1) {
                empty += sums[number] == 0 ? 1 : 0;
            }
            return empty;
        }

        /** As many as centres have no points here: what has none anywhere has none here. */
        private static double[] far(double[] points, int columns, int[] labels, double[] distances, int empty) {
            int[] farthest = empty == 0
                    ? new int[0]
                    : IntStream.range(0, labels.length)
                            .boxed()
                            .sorted(Comparator.comparingDouble((Integer row) -> -distances[row]))
                            .limit(empty)
                            .mapToInt(Integer::intValue)
                            .toArray();
            double[] far = new double[farthest.length * (columns + 2)];
            for (int index = 0; index < farthest.length; index++) {
                int start = index * (columns + 2);
                far[start] = distances[farthest[index]];
                far[start + 1] = labels[farthest[index]];
                System.arraycopy(points, farthest[index] * columns, far, start + 2, columns);
            }
            return far;
        }

        private static ByteBuffer checksum(int[] labels) {
            ByteBuffer content = ByteBuffer.allocate(labels.length * Integer.BYTES).order(ByteOrder.LITTLE_ENDIAN);
            content.asIntBuffer().put(labels);
            CRC32 checksum = new CRC32();
            checksum.update(content);
            ByteBuffer said = ByteBuffer.allocate(Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
            return said.putLong(checksum.getValue()).flip();
        }
    }

    /** The new centres. Inputs: the old ones, the results of the map tasks, and the points. */
    public static final class Update implements Task {
        @Override
        public Object run(Context context) throws IOException {
            Stopwatch watch = new Stopwatch();
            State state = context.arguments(State.class);
            int columns = state.plan().columns();
            List<Reference> inputs = context.inputs();
            List<Reference> points = inputs.subList(1 + state.maps(), inputs.size());
            double[] old = numbersOf(context, inputs.get(0), 0);
            double[] total = new double[old.length / columns * (columns + 1)];
            List<double[]> far = new ArrayList<>();
            List<Long> labels = new ArrayList<>();
            for (Reference sums : inputs.subList(1, 1 + state.maps())) {
                double[] own = numbersOf(context, sums, 0);
                for (int index = 0; index < total.length; index++) {
                    total[index] += own[index];
                }
                double[] distant = numbersOf(context, sums, 1);
                for (int start = 0; start < distant.length; start += columns + 2) {
                    far.add(java.util.Arrays.copyOfRange(distant, start, start + columns + 2));
                }
                byte[] checksum = context.fetch(sums, 2);
                labels.add(ByteBuffer.wrap(checksum).order(ByteOrder.LITTLE_ENDIAN).getLong());
            }
            double shuffled = watch.seconds();
            fill(total, far, columns);
            double[] centres = old.clone();
            double shift = 0;
            long counted = 0;
            for (int centre = 0; centre < old.length / columns; centre++) {
                double count = total[centre * (columns + 1) + columns];
                counted += (long) count;
                for (int column = 0; count > 0 && column < columns; column++) {
                    int place = centre * columns + column;
                    centres[place] = total[centre * (columns + 1) + column] / count;
                    shift += (centres[place] - old[place]) * (centres[place] - old[place]);
                }
            }
            List<Move> moves = new ArrayList<>(state.moves());
            moves.add(new Move(shift, counted, labels));
            Reference made = context.put(bytesOf(centres));
            context.notePhases(Map.of("shuffle_s", shuffled, "reduce_s", watch.seconds()));
            if (moves.size() == ITERATIONS_MAX || isStanding(moves, state.plan().tolerance())) {
                return new Outcome(moves, List.of(made));
            }
            iterate(context, new State(state.plan(), moves, state.maps()), made, points);
            return null;
        }

        /** A centre that lost all its points goes to the point that is farthest from its own centre, which loses it. */
        private static void fill(double[] total, List<double[]> far, int columns) {
            far.sort(Comparator.comparingDouble((double[] point) -> -point[0]));
            int next = 0;
            for (int start = 0; start < total.length && next < far.size(); start += columns + 1) {
                if (total[start + columns] != 0) {
                    continue;
                }
                double[] point = far.get(next++);
                if (point[0] > 0) {
                    int loser = (int) point[1] * (columns + 1);
                    for (int column = 0; column < columns; column++) {
                        total[loser + column] -= point[2 + column];
                        total[start + column] = point[2 + column];
                    }
                    total[loser + columns]--;
                    total[start + columns] = 1;
                }
            }
        }

        private static boolean isStanding(List<Move> moves, double tolerance) {
            Move last = moves.get(moves.size() - 1);
            boolean same = moves.size() > 1 && last.labels().equals(moves.get(moves.size() - 2).labels());
            return same || last.shift() <= tolerance;
        }
    }
}
