import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Many ScienceWorld games in one process, each behind a class loader of its own, because the engine keeps its random numbers, object
 * ids and simplifications in static fields. Talks to its owner over its own standard input and output, so there is no port to guard,
 * and it ends when its owner does. The engine's own printing goes nowhere.
 *
 * A request is: int length, then int call, byte operation, int slot, int count, and count times int length and UTF-8.
 * A reply is: int length, then int call, byte 0 (done) or 1 (failed), long CPU nanoseconds of the engine, int count and texts as above.
 */
public final class Slots {
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    private final Map<Integer, Game> games = new ConcurrentHashMap<>();
    private final DataOutputStream replies;
    private final URL[] classes;

    private Slots(OutputStream replies, URL[] classes) {
        this.replies = new DataOutputStream(new BufferedOutputStream(replies));
        this.classes = classes;
    }

    /** Arguments: this archive and the engine's, as paths. */
    public static void main(String[] paths) throws IOException {
        OutputStream replies = new FileOutputStream(FileDescriptor.out);
        System.setOut(new PrintStream(new Nowhere())); // before the first class of the engine keeps the real one
        URL[] classes = new URL[paths.length];
        for (int i = 0; i < paths.length; i++) {
            classes[i] = new java.io.File(paths[i]).toURI().toURL();
        }
        Slots slots = new Slots(replies, classes);
        ExecutorService workers = Executors.newCachedThreadPool();
        DataInputStream requests = new DataInputStream(new BufferedInputStream(new FileInputStream(FileDescriptor.in)));
        try {
            while (true) {
                byte[] frame = new byte[requests.readInt()];
                requests.readFully(frame);
                workers.execute(() -> slots.answer(frame));
            }
        } catch (EOFException ownerIsGone) {
            Runtime.getRuntime().halt(0); // also while a game runs on
        }
    }

    private void answer(byte[] frame) {
        int call = 0;
        long began = THREADS.getCurrentThreadCpuTime();
        boolean failed = false;
        List<String> texts;
        try (DataInputStream in = new DataInputStream(new java.io.ByteArrayInputStream(frame))) {
            call = in.readInt();
            char operation = (char) in.readByte();
            int slot = in.readInt();
            String[] given = new String[in.readInt()];
            for (int i = 0; i < given.length; i++) {
                byte[] text = new byte[in.readInt()];
                in.readFully(text);
                given[i] = new String(text, StandardCharsets.UTF_8);
            }
            texts = carryOut(operation, slot, given);
        } catch (Throwable error) { // a stack overflow too must be answered; memory running out ends the process by its own option
            Throwable cause = error instanceof InvocationTargetException ? error.getCause() : error;
            texts = new ArrayList<>();
            texts.add(cause.getClass().getName() + (cause.getMessage() == null ? "" : " " + cause.getMessage()));
            failed = true;
        }
        try {
            send(call, failed, THREADS.getCurrentThreadCpuTime() - began, texts);
        } catch (IOException ownerIsGone) {
            Runtime.getRuntime().halt(0);
        }
    }

    private List<String> carryOut(char operation, int slot, String[] given) throws Exception {
        List<String> texts = new ArrayList<>();
        switch (operation) {
            case 'o': // open the slot
                games.put(slot, new Game(classes));
                break;
            case 'd': // drop it
                games.remove(slot);
                break;
            case 'l': { // load: task, variation -> description, then as for a step
                Game game = game(slot);
                game.load(given[0], Integer.parseInt(given[1]), false);
                texts.add((String) game.ask("getTaskDescription"));
                game.step("look around", texts);
                break;
            }
            case 's': // step: action -> observation, score (0..1, below 0 for a failure), completed, moves
                game(slot).step(given[0], texts);
                break;
            case 'g': { // gold: task, variation -> actions
                Game game = game(slot);
                game.load(given[0], Integer.parseInt(given[1]), true);
                addAll(texts, game.ask("getGoldActionSequence"));
                break;
            }
            case 'a': // ask: names of methods without arguments -> their answers, lists joined by newlines
                for (String name : given) {
                    Object answer = game(slot).ask(name);
                    List<String> lines = new ArrayList<>();
                    addAll(lines, answer);
                    texts.add(String.join("\n", lines));
                }
                break;
            case 'u': // universe -> tree of all objects, as JSON
                texts.add(game(slot).universe());
                break;
            case 'v': // variations: tasks -> how many each has
                for (String task : given) {
                    texts.add(game(slot).variations(task));
                }
                break;
            default:
                throw new IllegalArgumentException("unknown operation " + operation);
        }
        return texts;
    }

    private Game game(int slot) {
        Game game = games.get(slot);
        if (game == null) {
            throw new IllegalStateException("slot " + slot + " is not open");
        }
        return game;
    }

    private static void addAll(List<String> texts, Object answer) {
        if (answer instanceof Iterable) {
            for (Object text : (Iterable<?>) answer) {
                texts.add(String.valueOf(text));
            }
        } else {
            texts.add(String.valueOf(answer));
        }
    }

    private void send(int call, boolean failed, long nanoseconds, List<String> texts) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        DataOutputStream out = new DataOutputStream(bytes);
        out.writeInt(call);
        out.writeByte(failed ? 1 : 0);
        out.writeLong(nanoseconds);
        out.writeInt(texts.size());
        for (String text : texts) {
            byte[] encoded = text.getBytes(StandardCharsets.UTF_8);
            out.writeInt(encoded.length);
            out.write(encoded);
        }
        synchronized (replies) {
            replies.writeInt(bytes.size());
            bytes.writeTo(replies);
            replies.flush();
        }
    }

    /** One game: the engine's own interface object, reached by reflection since its class is another one in every slot. */
    private static final class Game {
        private final Object engine;
        private final Method step;

        Game(URL[] classes) throws Exception {
            Class<?> type = new Own(classes).loadClass("scienceworld.runtime.pythonapi.PythonInterface");
            engine = type.getConstructor().newInstance();
            step = type.getMethod("step", String.class);
        }

        void load(String task, int variation, boolean gold) throws Exception {
            Method load = engine.getClass().getMethod("load", String.class, int.class, String.class, boolean.class);
            String complaint = (String) load.invoke(engine, task, variation, "", gold);
            if (complaint != null && !complaint.isEmpty()) {
                throw new IllegalArgumentException(complaint);
            }
        }

        void step(String action, List<String> texts) throws Exception {
            texts.add((String) step.invoke(engine, action));
            texts.add(String.valueOf(ask("getScore")));
            texts.add(String.valueOf(ask("getCompleted")));
            texts.add(String.valueOf(ask("getNumMoves")));
        }

        Object ask(String name) throws Exception {
            return engine.getClass().getMethod(name).invoke(engine);
        }

        String variations(String task) throws Exception {
            return String.valueOf(engine.getClass().getMethod("getTaskMaxVariations", String.class).invoke(engine, task));
        }

        String universe() throws Exception {
            Object game = ask("agentInterface");
            game = game.getClass().getMethod("get").invoke(game);
            Object universe = game.getClass().getMethod("universe").invoke(game);
            return (String) universe.getClass().getMethod("toJSON").invoke(universe);
        }
    }

    /** Has the engine, and the two classes of the Scala library whose state it uses, for itself; the rest is shared. */
    private static final class Own extends URLClassLoader {
        private static final String[] PREFIXES = {
            "scienceworld.", "main.scala.", "util.", "language.", "scala.util.Random", "scala.sys.package$",
        };

        Own(URL[] classes) {
            super(classes, Slots.class.getClassLoader());
        }

        @Override
        protected Class<?> loadClass(String name, boolean resolve) throws ClassNotFoundException {
            for (String prefix : PREFIXES) {
                if (name.startsWith(prefix)) {
                    synchronized (getClassLoadingLock(name)) {
                        Class<?> found = findLoadedClass(name);
                        return found != null ? found : findClass(name);
                    }
                }
            }
            return super.loadClass(name, resolve);
        }
    }

    private static final class Nowhere extends OutputStream {
        @Override
        public void write(int one) {}

        @Override
        public void write(byte[] bytes, int from, int count) {}
    }
}
