import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.File;
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
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Semaphore;

/**
 * Many ScienceWorld games in one process, each behind a class loader of its own, because the engine keeps its random numbers, object
 * ids and simplifications in static fields. A slot is a thread that plays one game after another and talks to its owner over two pipes
 * it was born with, so there is no port to guard. Standard input is the owner's life: at its end the process halts. The engine's own
 * printing goes nowhere.
 *
 * A request is: byte operation, int count, and count times int length and UTF-8.
 * A reply is: int length, then byte 0 (done) or 1 (failed), long CPU nanoseconds of the engine, int count and texts as above.
 */
public final class Slots extends Thread {
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();
    /** More games of this process at once than cores only wait for each other; in the order of their requests none waits for long. */
    private static final Semaphore CORES = new Semaphore(Runtime.getRuntime().availableProcessors(), true);

    private final URL[] classes;
    private final DataInputStream requests;
    private final OutputStream replies;
    private Game game; // null before the first

    private Slots(URL[] classes, String requests, String replies) throws IOException {
        this.classes = classes;
        this.requests = new DataInputStream(new BufferedInputStream(new FileInputStream("/dev/fd/" + requests)));
        this.replies = new FileOutputStream("/dev/fd/" + replies);
        setDaemon(true);
    }

    /** Arguments: this archive and the engine's, as paths; then for each slot the descriptors of its requests and its replies. */
    public static void main(String[] given) throws IOException {
        System.setOut(new PrintStream(new Nowhere())); // before the first class of the engine keeps the real one
        URL[] classes = {new File(given[0]).toURI().toURL(), new File(given[1]).toURI().toURL()};
        for (int i = 2; i < given.length; i += 2) {
            new Slots(classes, given[i], given[i + 1]).start();
        }
        while (System.in.read() >= 0) {}
        Runtime.getRuntime().halt(0); // also while a game runs on
    }

    @Override
    public void run() {
        try {
            while (true) {
                char operation = (char) requests.readByte();
                String[] given = new String[requests.readInt()];
                for (int i = 0; i < given.length; i++) {
                    byte[] text = new byte[requests.readInt()];
                    requests.readFully(text);
                    given[i] = new String(text, StandardCharsets.UTF_8);
                }
                answer(operation, given);
            }
        } catch (IOException ownerIsGone) {
            Runtime.getRuntime().halt(0);
        }
    }

    private void answer(char operation, String[] given) throws IOException {
        long began = THREADS.getCurrentThreadCpuTime();
        boolean failed = false;
        List<String> texts;
        CORES.acquireUninterruptibly();
        try {
            texts = carryOut(operation, given);
        } catch (Throwable error) { // a stack overflow too must be answered; memory running out ends the process by its own option
            Throwable cause = error instanceof InvocationTargetException ? error.getCause() : error;
            texts = new ArrayList<>();
            texts.add(cause.getClass().getName() + (cause.getMessage() == null ? "" : " " + cause.getMessage()));
            failed = true;
        } finally {
            CORES.release();
        }
        send(failed, THREADS.getCurrentThreadCpuTime() - began, texts);
    }

    private List<String> carryOut(char operation, String[] given) throws Exception {
        List<String> texts = new ArrayList<>();
        switch (operation) {
            case 'o': // open the slot
                game = null; // the memory of a broken one
                game = new Game(classes);
                break;
            case 'l': // load: task, variation -> description, then as for a step
                game.load(given[0], Integer.parseInt(given[1]), false);
                texts.add((String) game.ask("getTaskDescription"));
                game.step("look around", texts);
                break;
            case 's': // step: action -> observation, score (0..1, below 0 for a failure), completed, moves
                game.step(given[0], texts);
                break;
            case 'g': // gold: task, variation -> actions
                game.load(given[0], Integer.parseInt(given[1]), true);
                addAll(texts, game.ask("getGoldActionSequence"));
                break;
            case 'a': // ask: names of methods without arguments -> their answers, lists joined by newlines
                for (String name : given) {
                    Object answer = game.ask(name);
                    List<String> lines = new ArrayList<>();
                    addAll(lines, answer);
                    texts.add(String.join("\n", lines));
                }
                break;
            case 'u': // universe -> tree of all objects, as JSON
                texts.add(game.universe());
                break;
            case 'v': // variations: tasks -> how many each has
                for (String task : given) {
                    texts.add(game.variations(task));
                }
                break;
            default:
                throw new IllegalArgumentException("unknown operation " + operation);
        }
        return texts;
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

    private void send(boolean failed, long nanoseconds, List<String> texts) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        DataOutputStream out = new DataOutputStream(bytes);
        out.writeInt(0); // the length, below
        out.writeByte(failed ? 1 : 0);
        out.writeLong(nanoseconds);
        out.writeInt(texts.size());
        for (String text : texts) {
            byte[] encoded = text.getBytes(StandardCharsets.UTF_8);
            out.writeInt(encoded.length);
            out.write(encoded);
        }
        byte[] reply = bytes.toByteArray();
        ByteBuffer.wrap(reply).putInt(0, reply.length - 4);
        replies.write(reply);
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
